"""A sweep of 24 trials of the digits, two of them infeasible and one failing, beside the same trials by plain Ray Tune with a
``TorchTrainer`` for each, on two cores. Plain trials train as many steps as ours were measured over; all rounds are of one run.

    python -m benchmarks.sweep [--plain 4] [--out FILE]

On a GPU: a grid of 16 trials of a transformer, a search with half of them, and the plan's own choice without a sweep.

    python -m benchmarks.sweep --gpu [--out FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support import header, markdown_table, write_result
from orchestrator.config.settings import Config
from orchestrator.config.space import Space, point_flags
from orchestrator.config.space_parser import parse_space, points_space
from orchestrator.config.sweep import Search, Sweep
from orchestrator.record.ledger import SweepRecord, TrialRow
from orchestrator.record.sweep_table import throughput_text
from orchestrator.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
GPU_SPACE = ["precision=fp32,bf16", "batch-size=8,32", "accumulation-steps=1,4", "compile=off,on"]
GPU_TASK: dict[str, Any] = {
    "task": "text",
    "experts": 0,
    "width": 768,
    "layers": 6,
    "context_length": 512,
    "epochs": 1000,
}


def space_of_24() -> Space:
    """21 points that run, two for more workers than there are cores, and one with more experts per token than there are."""
    points: list[dict[str, Any]] = [
        {"batch_size": batch, "accumulation_steps": accumulation, "workers": workers}
        for workers in (1, 2)
        for batch in (16, 32, 64, 128)
        for accumulation in (1, 2, 4)
    ][:21]
    refused = [{"batch_size": 16, "accumulation_steps": 1, "workers": workers} for workers in (3, 64)]
    return points_space(
        [*points, *refused, {"batch_size": 16, "accumulation_steps": 1, "workers": 1, "top_k": 9}],
        "24 points",
    )


def swept(
    space: Space,
    folder: Path,
    seconds: float,
    search: Search = "grid",
    trials: int | None = None,
    **settings: Any,
) -> tuple[SweepRecord, float]:
    begun = time.perf_counter()
    record = Trainer(config=Config.of(run_dir=folder, **settings)).sweep(
        Sweep(space, search, trials, trial_seconds=seconds)
    )
    return record, time.perf_counter() - begun


def plain(rows: list[TrialRow], folder: Path) -> float:
    """Seconds of these trials by plain Tune: one Tuner over them, a TorchTrainer for each; Ray's start is not counted."""
    asked = ",".join(
        f"{row.workers}:{row.batch_size}:{row.accumulation_steps}:{(row.steps or 0) + 8}" for row in rows
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "plain_tune.py"), str(folder), asked]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"plain Tune failed:\n{done.stderr[-3000:]}")
    return float(next(line for line in done.stdout.splitlines() if " trials in " in line).split()[3])


def on_cpu(count: int, folder: Path) -> str:
    record, seconds = swept(space_of_24(), folder / "ours", 3.0)
    done = [row for row in record.rows if row.status == "completed"]
    chosen = done[:: max(1, len(done) // count)][:count]
    theirs, ours, table_s = (
        plain(chosen, folder / "plain") / len(chosen),
        seconds / len(done),
        seconds / len(record.rows),
    )
    statuses = {
        status: sum(row.status == status for row in record.rows)
        for status in ("completed", "infeasible", "failed")
    }
    beyond = sorted(row.start_seconds or 0.0 for row in done)
    table = [
        (
            row.trial,
            " ".join(point_flags(row.point)),
            row.status,
            row.reason or f"{throughput_text(row)} samples/s",
            f"{row.seconds:.1f}",
            "" if row.start_seconds is None else f"{row.start_seconds:.2f}",
        )
        for row in record.rows
    ]
    return (
        f"{len(record.rows)} trials in {seconds:.1f} s, Ray's start and the report included: {statuses}.\n\n"
        f"Beyond its steps a trial cost {beyond[len(beyond) // 2]:.2f} s (median) and {beyond[int(len(beyond) * 0.8)]:.2f} s (80 %); "
        f"those that start workers, which import torch, up to {beyond[-1]:.1f} s.\n\n"
        f"Plain Tune with a TorchTrainer for each of {len(chosen)} of the trials (Ray's start not counted): {theirs:.1f} s per trial; ours "
        f"{ours:.1f} s per measured trial: **{theirs / ours:.1f} times** as fast ({theirs / table_s:.1f} by all rows of the table).\n\n"
        + markdown_table(
            ["trial", "settings", "status", "throughput, or the reason", "seconds", "beyond its steps"], table
        )
    )


def on_gpu(folder: Path) -> str:
    space = parse_space(GPU_SPACE)
    grid, grid_s = swept(space, folder / "grid", 3.0, **GPU_TASK)
    search, search_s = swept(space, folder / "search", 3.0, "optuna", len(space.grid()) // 2, **GPU_TASK)
    planned, _ = swept(parse_space(["seed=0"]), folder / "planned", 3.0, **GPU_TASK)
    best, found, own = grid.best(), search.best(), planned.best()
    assert best is not None
    assert found is not None
    assert own is not None
    at_best = next(row for row in grid.rows if row.point == found.point)

    def rate(row: TrialRow) -> float:
        return row.samples_per_second or 0.0

    rows = [(row.trial, " ".join(point_flags(row.point)), row.status, throughput_text(row),
             f"{(row.peak_memory_bytes or 0) / 2**30:.1f} GiB", f"{row.seconds:.1f}") for row in grid.rows]  # fmt: skip
    return (
        f"Grid: {len(grid.rows)} trials in {grid_s:.0f} s; best {rate(best):,.1f} samples/s: {' '.join(point_flags(best.point))}.\n"
        f"Search with {len(search.rows)} trials in {search_s:.0f} s: best {rate(found):,.1f} samples/s, "
        f"{' '.join(point_flags(found.point))}: "
        f"**{rate(found) / rate(best):.3f}** of the grid's best, by the grid's own figure for it {rate(at_best) / rate(best):.3f}.\n"
        f"The plan's own choice, without a sweep: {own.precision}, {own.batch_size} × {own.accumulation_steps}, compile {own.compile}: "
        f"{rate(own):,.1f} samples/s, **{rate(own) / rate(best):.3f}** of it.\n\n"
        + markdown_table(["trial", "settings", "status", "samples/s", "memory", "seconds"], rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", type=int, default=4)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        body = on_gpu(Path(folder)) if given.gpu else on_cpu(given.plain, Path(folder))
    text = header("Sweeps" + (" on a GPU" if given.gpu else " beside plain Ray Tune"), given) + body
    sys.stdout.write(text)
    write_result(given.out, text)


if __name__ == "__main__":
    main()
