"""A sweep of 24 trials, and the same trials by plain Ray Tune with a ``TorchTrainer`` for each, on
two cores.

    python -m benchmarks.tuning.sweep [--plain 4] [--out FILE]

The trials train on the digits; two of them are infeasible and one fails. Plain trials train as many
steps as ours were measured over; all of them are of one run.

    python -m benchmarks.tuning.sweep --gpu [--out FILE]

On a GPU: a grid of 16 trials of a transformer, a search with half of them, and the plan's own
choice without a sweep.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.support import benchmark_parser, header, markdown_table, write_result
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Space, point_flags
from orchestrator.config.sweep.space_parser import parse_space, points_space
from orchestrator.config.sweep.sweep import Search, Sweep
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.sweep_table import throughput_text
from orchestrator.trainer import Trainer
from orchestrator.types import GIB

GPU_SPACE = ["precision=fp32,bf16", "batch-size=8,32", "accumulation-steps=1,4", "compile=off,on"]
GPU_TASK: dict[str, Any] = {
    "task": "text",
    "experts": 0,
    "width": 768,
    "layers": 6,
    "sequence_length": 512,
    "epochs": 1000,
}


TRIAL_SECONDS = 3.0
PLAIN_WARM_UP = 8  # steps that a trial of ours does before it is measured


def space_of_24() -> Space:
    """Return 21 points that run, two with more workers than cores, and one with more experts per
    token than experts.
    """
    points: list[dict[str, Any]] = [
        {"batch_size": batch, "accumulation_steps": accumulation, "workers": workers}
        for workers in (1, 2)
        for batch in (16, 32, 64, 128)
        for accumulation in (1, 2, 4)
    ][:21]
    infeasible = [{"batch_size": 16, "accumulation_steps": 1, "workers": workers} for workers in (3, 64)]
    failing = {"batch_size": 16, "accumulation_steps": 1, "workers": 1, "top_k": 9}
    return points_space([*points, *infeasible, failing], "24 points")


def sweep(
    space: Space, folder: Path, search: Search = "grid", trials: int | None = None, **settings: Any
) -> tuple[SweepRecord, float]:
    """Run a sweep. Returns its record and its seconds."""
    begun = time.perf_counter()
    trainer = Trainer(config=Config.of(run_dir=folder, **settings))
    record = trainer.sweep(Sweep(space, search, trials, trial_seconds=TRIAL_SECONDS))
    return record, time.perf_counter() - begun


def sweep_plain(rows: list[TrialRow], folder: Path) -> float:
    """Return the seconds of these trials by one plain Tuner, with a TorchTrainer for each; Ray's
    start is not counted.
    """
    entries = ",".join(
        f"{row.workers}:{row.batch_size}:{row.accumulation_steps}:{(row.steps or 0) + PLAIN_WARM_UP}"
        for row in rows
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "tuning" / "plain_tune.py"), str(folder), entries]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"plain Tune failed:\n{done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if " trials in " in line)
    return float(line.split()[3])


def on_cpu(num_plain: int, folder: Path) -> str:
    """Compare the sweep of 24 trials with plain Tune over some of them."""
    record, seconds = sweep(space_of_24(), folder / "ours")
    # infeasible and failed trials cost next to nothing: only completed ones are compared with plain Tune
    completed = [row for row in record.rows if row.status == "completed"]
    compared = completed[:: max(1, len(completed) // num_plain)][:num_plain]
    plain_s = sweep_plain(compared, folder / "plain") / len(compared)
    ours_s = seconds / len(completed)
    row_s = seconds / len(record.rows)
    statuses = {
        status: sum(row.status == status for row in record.rows)
        for status in ("completed", "infeasible", "failed")
    }
    start_s = sorted(row.start_seconds or 0.0 for row in completed)
    columns = ["trial", "settings", "status", "throughput, or the reason", "seconds", "beyond its steps"]
    return (
        f"{len(record.rows)} trials in {seconds:.1f} s, Ray's start and the report included: {statuses}.\n\n"
        f"Beyond its steps a trial cost {start_s[len(start_s) // 2]:.2f} s (median) and "
        f"{start_s[int(len(start_s) * 0.8)]:.2f} s (80 %); "
        f"those that start workers, which import torch, up to {start_s[-1]:.1f} s.\n\n"
        f"Plain Tune with a TorchTrainer for each of {len(compared)} of the trials (Ray's start "
        f"not counted): "
        f"{plain_s:.1f} s per trial; ours {ours_s:.1f} s per measured trial: "
        f"**{plain_s / ours_s:.1f} times** "
        f"as fast ({plain_s / row_s:.1f} by all rows of the table).\n\n"
        + markdown_table(columns, [_cpu_cells(row) for row in record.rows])
    )


def _cpu_cells(row: TrialRow) -> list[object]:
    result = row.reason or f"{throughput_text(row)} samples/s"
    start = "" if row.start_seconds is None else f"{row.start_seconds:.2f}"
    return [row.trial, " ".join(point_flags(row.point)), row.status, result, f"{row.seconds:.1f}", start]


def on_gpu(folder: Path) -> str:
    """Compare a grid, a search with half its trials, and the plan's own choice."""
    space = parse_space(GPU_SPACE)
    grid, grid_s = sweep(space, folder / "grid", **GPU_TASK)
    search, search_s = sweep(space, folder / "search", "optuna", len(space.grid()) // 2, **GPU_TASK)
    planned, _ = sweep(parse_space(["seed=0"]), folder / "planned", **GPU_TASK)
    best = best_of(grid)
    best_found = best_of(search)
    own = best_of(planned)
    # the grid measured the point that the search found too
    same_in_grid = next(row for row in grid.rows if row.point == best_found.point)
    return (
        f"Grid: {len(grid.rows)} trials in {grid_s:.0f} s; best {rate(best):,.1f} samples/s: "
        f"{' '.join(point_flags(best.point))}.\n"
        f"Search with {len(search.rows)} trials in {search_s:.0f} s: best {rate(best_found):,.1f} samples/s, "
        f"{' '.join(point_flags(best_found.point))}: **{rate(best_found) / rate(best):.3f}** of "
        f"the grid's best, "
        f"by the grid's own figure for it {rate(same_in_grid) / rate(best):.3f}.\n"
        f"The plan's own choice, without a sweep: {own.precision}, {own.batch_size} × "
        f"{own.accumulation_steps}, "
        f"compile {own.compile}: {rate(own):,.1f} samples/s, **{rate(own) / rate(best):.3f}** of it.\n\n"
        + markdown_table(
            ["trial", "settings", "status", "samples/s", "memory", "seconds"],
            [_gpu_cells(row) for row in grid.rows],
        )
    )


def best_of(record: SweepRecord) -> TrialRow:
    best = record.best()
    assert best is not None, "no trial completed"
    return best


def rate(row: TrialRow) -> float:
    return row.samples_per_second or 0.0


def _gpu_cells(row: TrialRow) -> list[object]:
    memory = f"{(row.peak_memory_bytes or 0) / GIB:.1f} GiB"
    settings = " ".join(point_flags(row.point))
    return [row.trial, settings, row.status, throughput_text(row), memory, f"{row.seconds:.1f}"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--plain", type=int, default=4, help="trials to repeat by plain Ray Tune")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        body = on_gpu(Path(folder)) if arguments.gpu else on_cpu(arguments.plain, Path(folder))
    title = "Sweeps on a GPU" if arguments.gpu else "Sweeps beside plain Ray Tune"
    text = header(title, arguments) + body
    sys.stdout.write(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
