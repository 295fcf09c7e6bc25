"""Benchmarks run to their end on a CPU with the smallest arguments: their tables have the expected rows,
and figures that are finite and positive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.moe.imbalance import DISTRIBUTIONS
from harness.runs.benchmark_runs import programs, run_benchmark, wrong_figures

ANY = ()
"""A table with rows whose names do not matter."""


@dataclass(frozen=True)
class SmallRun:
    """Arguments of a benchmark, and the first cells of each table's rows."""

    benchmark: str
    flags: str
    rows: tuple[tuple[str, ...], ...]
    may_be_zero: tuple[str, ...] = ()
    """Columns that count something there may be none of, show a change, or round a tiny figure to zero."""


BARE = ("GPT-2 small", "GPT-2 small")
CHANGES = ("points with changes", "moves", "copies added or removed", "GB sent", "ms sending", "decision, ms")
RUNS = (
    SmallRun("steps.loop_overhead", "--small --rounds 1 --cases 1 --loops orchestrator", ((*BARE, BARE[0]),)),
    SmallRun("steps.whole_step", "--small --steps 2 --plain", (("torch's own operations, eager",),)),
    SmallRun(
        "steps.whole_step",
        "--small --steps 2 --profile --peers fp32",
        (("ours, eager", "transformers Mixtral, grouped_mm, fp32 weights"), ANY),
        ("kernel",),
    ),
    SmallRun("moe.expert_kernels", "--rounds 1 --shapes 1", (("8 × 256 × 64 × 64",),)),
    SmallRun(
        "moe.placement",
        "--draws 1 --largest 64 8",
        (ANY, ("6", "7", "8", "6", "10"), ("even within half", "Zipf", "equal")),
        (
            "exact",
            "ours above the optimum, worst",
            "optimum above the bound, mean",
            "median s",
            "slowest s",
            "above the lower bound",
        ),
    ),
    SmallRun(
        "moe.imbalance",
        "--hosts 2 --experts 8 --steps 12",
        (tuple(DISTRIBUTIONS), tuple(name for name in DISTRIBUTIONS for _ in range(2))),
        ("steps until ≤ 1.05", "most steps until ≤ 1.05", *CHANGES),
    ),
    SmallRun(
        "models.families",
        "--families Mixtral --hosts 1",
        (("Mixtral",),),
        # Equal to the last bit is right too.
        ("loss", "gradients", "5 AdamW steps", "auxiliary loss", "its gradients", "5 AdamW steps with it"),
    ),
    SmallRun(
        "parallel.exchange_memory",
        "--hosts 2 --tokens 32 --width 16 --rounds 1",
        (("float32", "bfloat16"),),
    ),
    SmallRun("parallel.reproducible", "--parts cost --hosts 2 --rounds 1 --cost-steps 2", (("2",) * 3,)),
    SmallRun(
        "steps.weight_precision",
        "--steps 2 --seeds 1 --rates 1e-3",
        (("fp32", "bf16, stochastic", "bf16, to the nearest"),),
    ),
    SmallRun("recovery.host_counts", "--hosts 2", (("2",), ("2",))),
    SmallRun("storage.checkpoint_stall", "--small --steps 12 --every 4", (ANY,), ("",)),
    SmallRun(
        "storage.remote_runs",
        "--small --steps 12 --every 4 --rounds 1 --places disk file://",
        (("disk", "file://"),),
        ("step, ms (median)", "stall of a save, ms", "checkpoint, MiB", "last upload after the end, s"),
    ),
)
RUN_ELSEWHERE = {
    "code_style": "its figures: test_code_style",
    "models.lora": "without processes of their own: models/test_lora",
    "models.model_files": "without processes of their own: models/test_model_files",
    "moe.moe_layer": "its mathematics on a CPU: moe/test_moe_layer",
    "moe.skewed_load": "its rows on a CPU: moe/test_moe_layer",
    "parallel.exchange_overlap": "hosts as threads: parallel/test_exchange_overlap",
    "parallel.spmd_layer": "steps of one rank: parallel/test_spmd_layer",
    "planning.control_plane": "planning/test_control_plane",
    "planning.costmodel": "one configuration, and a small model: planning/test_costmodel",
    "planning.costmodel_steps": "one configuration: planning/test_costmodel",
    "steps.lm_step": "steps/test_lm_step",
    "steps.loss_curves": "steps/test_loss_curves",
    "storage.checkpoints": "hosts as threads: storage/test_checkpoints",
}
NOT_RUN = {
    "parallel.expert_parallel": "starts torchrun and Ray",
    "recovery.chaos": "starts Ray, and takes minutes",
    "recovery.dp_restart": "starts Ray, and takes minutes",
    "recovery.namespaces": "needs root",
    "recovery.node_link": "needs two nodes",
    "recovery.plain_chaos": "starts Ray, and trains until it is killed",
    "startup.install": "builds distributions, and takes minutes",
    "startup.start": "starts Ray",
    "storage.long_records": "trains, resumes and reports in processes of its own: half a minute",
    "storage.snapshots": "starts Ray",
    "tuning.batch_auto": "needs a GPU",
    "tuning.plain_tune": "starts Ray",
    "tuning.sweep": "starts Ray, and takes minutes",
}
"""Benchmarks of which only ``--help`` is tested, and why."""


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.benchmark} {run.flags}")
def test_the_table_is_complete(run: SmallRun, tmp_path: Path) -> None:
    tables = run_benchmark(run.benchmark, run.flags, tmp_path)
    assert len(tables) == len(run.rows)
    for table, names in zip(tables, run.rows, strict=True):
        assert table.names, table.columns
        assert table.names == list(names) or names == ANY
        assert wrong_figures(table, run.may_be_zero) == []


def test_each_benchmark_is_run_or_has_a_reason() -> None:
    """A new benchmark belongs in one of the three lists above."""
    run_here = {run.benchmark for run in RUNS}
    lists = [run_here, set(RUN_ELSEWHERE), set(NOT_RUN)]
    assert set.union(*lists) == set(programs())
    assert sum(map(len, lists)) == len(programs()), "each is in one list"
