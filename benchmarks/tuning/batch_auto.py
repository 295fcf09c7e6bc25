"""Compare ``--batch-size auto`` with the largest batch that fits, and count its probes and
out-of-memory errors.

Bisection with the same memory limit, starting from the batch that auto found, gives the largest
one. GPU only.

    python -m benchmarks.tuning.batch_auto [--fraction 0.9] [--out FILE]
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.config.settings import Config
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.load import load_task
from orchestrator.train.data.steps import as_dataset
from orchestrator.train.group.world import World
from orchestrator.train.worker.batch_probe import Probed, find_batch, probe
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

GPT2: dict[str, Any] = {
    "task": "synthetic",
    "width": 768,
    "layers": 12,
    "sequence_length": 1024,
    "vocabulary": 50257,
    "experts": 0,
}
MOE: dict[str, Any] = {
    "task": "synthetic",
    "width": 512,
    "layers": 8,
    "sequence_length": 512,
    "experts": 16,
    "expert_hidden_size": (1024,),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("GPT-2 small, bf16", {**GPT2, "precision": "bf16"}),
    ("GPT-2 small, bf16, recomputing", {**GPT2, "precision": "bf16", "activation_checkpointing": "on"}),
    ("GPT-2 small, fp32", {**GPT2, "precision": "fp32"}),
    ("MoE decoder 16 × 1024, bf16", {**MOE, "precision": "bf16", "vocabulary": 8192}),
]


def true_largest(prepared: PreparedRun, world: World, batch_size: int) -> int:
    """Return the largest batch whose two steps pass, by bisection above the batch that auto found."""
    data = as_dataset(prepared.task.train_data())

    def passes(batch: int) -> bool:
        probed = Probed(prepared.resolved.config, prepared.plan, prepared.task, world, data)
        return probe(probed, batch).peak is not None

    good = batch_size
    bad = max(batch_size + 2, int(batch_size * 1.1))
    while passes(bad):
        good = bad
        bad = int(bad * 1.1) + 1
    # to half a percent
    while bad - good > max(1, good // 200):
        middle = (good + bad) // 2
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good


def measure(name: str, settings: dict[str, Any], fraction: float) -> list[object]:
    """Return the row of one model."""
    config = Config.of(
        batch_size="auto",
        samples=200_000 if settings["sequence_length"] < 1024 else 40_000,
        gpu_memory_fraction=fraction,
        **settings,
    )
    prepared = Trainer(task=load_task(config), config=config, quiet=True).prepare()
    world = World.single_process(prepared.plan.device.value)
    with torch_settings(config, prepared.plan, world.device):
        begun = time.perf_counter()
        result = find_batch(config, prepared.plan, prepared.task, world, prepared.facts)
        seconds = time.perf_counter() - begun
        best = true_largest(prepared, world, result.batch_size)
    failed = sum(trial.peak is None for trial in result.probes)
    peak = max(trial.peak for trial in result.probes if trial.peak is not None)
    probed = " ".join(str(trial.batch) for trial in result.probes)
    return [
        name,
        result.batch_size,
        best,
        f"{result.batch_size / best:.3f}",
        len(result.probes),
        failed,
        f"{peak / 2**30:.1f}",
        f"{seconds:.0f}",
        probed,
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--fraction", type=float, default=0.9)
    arguments = parser.parse_args()
    rows = [measure(name, settings, arguments.fraction) for name, settings in CASES]
    columns = [
        "model",
        "found",
        "largest that fits",
        "share",
        "probes",
        "out of memory",
        "peak GiB",
        "seconds",
        "batches probed",
    ]
    title = "--batch-size auto against the largest batch that fits"
    publish(header(title, arguments) + markdown_table(columns, rows), arguments.out)


if __name__ == "__main__":
    main()
