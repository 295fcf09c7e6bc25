"""Data-parallel training on two workers: time to the first step, per step, and to recover from a
killed worker.

A plain Ray Train job in the form of Ray's documentation (``plain_ray_train.py``: an MLP on the
digits, ``ray.train.report`` at every step) against ``orchestrator train`` on the digits, both with
a global batch of 64 and each on its own Ray. Rounds alternate; medians are compared. With
``--kill``, worker 1 is killed (SIGKILL) some steps after a checkpoint; both write one every 10
steps.

    python -m benchmarks.startup.ray_start [--rounds 3] [--kill] [--contestants plain ours] [--out FILE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.processes import LONGEST_S, ROOT, kill, started, tail, wait_until
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.record.files.reading import read_events

WARM_UP = 3
KILL_AT = 15  # a checkpoint every 10 steps: five are lost
KILLED_RANK = 1


@dataclass(frozen=True)
class StepMark:
    """A step that was done."""

    step: int
    time: float
    seconds: float | None
    """Its duration, where the contestant records it."""
    life: int
    """How many times the workers had been started again before it."""


@dataclass(frozen=True)
class Figures:
    """The figures of one run, in seconds."""

    first_step: float
    per_step: float
    total: float
    next_step: float | None = None
    new_step: float | None = None


@dataclass(frozen=True)
class Contestant:
    """A program that trains on two workers."""

    name: str
    command: Callable[[Path, int, bool], list[str]]
    steps: int
    steps_when_killed: int
    marks: Callable[[Path], list[StepMark]]
    pid_file: str


def plain_command(folder: Path, steps: int, with_kill: bool) -> list[str]:
    script = str(ROOT / "benchmarks" / "startup" / "plain_ray_train.py")
    every = "10" if with_kill else "0"
    return [sys.executable, script, str(folder), str(steps), "--checkpoint-every", every]


def our_command(folder: Path, steps: int, with_kill: bool) -> list[str]:
    flags = {
        "--parallel-strategy": "data_parallel",
        "--workers": "2",
        "--task": "digits",
        "--max-steps": str(steps),
        "--epochs": "100000",
        "--global-batch-size": "64",
        "--ray-address": "local",
        "--run-dir": str(folder / "run"),
    }
    if with_kill:
        flags["--checkpoint-every"] = "10"
    return [sys.executable, "-m", "orchestrator", "train", *(part for flag in flags.items() for part in flag)]


def plain_marks(folder: Path) -> list[StepMark]:
    """Read the steps of plain Ray Train. Restarted workers have other process ids."""
    path = folder / "steps.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    lives = list(dict.fromkeys(row["pid"] for row in rows))
    return [StepMark(row["step"], row["time"], None, lives.index(row["pid"])) for row in rows]


def our_marks(folder: Path) -> list[StepMark]:
    """Read our steps.

    A new life begins with the first ``start`` or ``recovery`` event after a step.
    """
    marks: list[StepMark] = []
    life = 0
    life_has_steps = False
    for event in read_events(folder / "run" / "events.jsonl"):
        if event["event"] == "step":
            seconds = None if event.get("warm_up") else event["seconds"]
            marks.append(StepMark(event["step"], event["time"], seconds, life))
            life_has_steps = True
        elif event["event"] in ("start", "recovery") and life_has_steps:
            life += 1
            life_has_steps = False
    return marks


# More of our steps than of the plain job's, which wait for Ray's poll. With a kill the run must
# outlast its recovery.
CONTESTANTS = {
    "plain": Contestant("plain Ray Train", plain_command, 30, 30, plain_marks, "worker_{rank}.pid"),
    "ours": Contestant("orchestrator", our_command, 200, 2000, our_marks, "run/logs/worker_{rank}.pid"),
}


def measure(contestant: Contestant, with_kill: bool) -> Figures:
    """Run a contestant once, from its command to its exit."""
    steps = contestant.steps_when_killed if with_kill else contestant.steps
    with tempfile.TemporaryDirectory(prefix="ray-start-") as name:
        folder = Path(name)
        begun = time.time()
        with started(contestant.command(folder, steps, with_kill), folder) as process:
            killed = kill_worker(contestant, folder, process) if with_kill else None
            code = process.wait(LONGEST_S)
        total = time.time() - begun
        marks = contestant.marks(folder)
        last = marks[-1].step if marks else 0
        if code != 0 or last < steps:
            raise RuntimeError(
                f"{contestant.name} ended with code {code} after {last} of {steps} steps:\n{tail(folder)}"
            )
    return figures(marks, begun, total, killed)


def kill_worker(contestant: Contestant, folder: Path, process: subprocess.Popen[bytes]) -> float:
    """Kill a worker once the run is a few steps past a checkpoint. Returns the time of the kill."""
    wait_until(
        lambda: any(mark.step >= KILL_AT for mark in contestant.marks(folder)), process, folder, poll_s=0.005
    )
    pid = int((folder / contestant.pid_file.format(rank=KILLED_RANK)).read_text())
    return kill(pid, process)


def figures(marks: list[StepMark], begun: float, total: float, killed: float | None) -> Figures:
    """Return the figures of a run, from its steps."""
    first_life = [mark for mark in marks if mark.life == 0]
    recorded = [mark.seconds for mark in first_life if mark.seconds is not None]
    between = [after.time - before.time for before, after in pairwise(first_life[WARM_UP:])]
    next_step = None
    new_step = None
    if killed is not None:
        later = [mark for mark in marks if mark.life > 0]
        highest = max(mark.step for mark in first_life)
        next_step = next((mark.time - killed for mark in later), None)
        new_step = next((mark.time - killed for mark in later if mark.step > highest), None)
    first_step = marks[0].time - begun
    return Figures(first_step, statistics.median(recorded or between), total, next_step, new_step)


def rows_of(results: dict[str, list[Figures]]) -> list[list[object]]:
    """Return a row for each figure that every contestant has."""
    steps = " / ".join(f"{name} {CONTESTANTS[name].steps} steps" for name in results)
    labels = {
        "first_step": "command to the first step, s",
        "per_step": "a step after warm-up, ms (plain: with its report, which waits for Ray's poll)",
        "total": f"command to exit, s ({steps})",
        "next_step": "killed worker to the next step, s",
        "new_step": "killed worker to the first step that is new, s",
    }
    rows: list[list[object]] = []
    for field, label in labels.items():
        values = {name: _values(runs, field) for name, runs in results.items()}
        if all(values.values()):
            rows.append([label, *_cells(values, 1000.0 if field == "per_step" else 1.0)])
    return rows


def _values(runs: list[Figures], field: str) -> list[float]:
    values = [getattr(run, field) for run in runs]
    return [value for value in values if value is not None]


def _cells(values: dict[str, list[float]], scale: float) -> list[str]:
    """Return median and range of each contestant, and the ratio of the first median to the last."""
    medians = [statistics.median(many) for many in values.values()]
    cells = [
        f"{median * scale:.2f} ({min(many) * scale:.2f}–{max(many) * scale:.2f})"
        for median, many in zip(medians, values.values(), strict=True)
    ]
    has_ratio = len(medians) > 1 and medians[0] and medians[-1]
    return [*cells, f"{medians[0] / medians[-1]:.2f}" if has_ratio else "–"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kill",
        action="store_true",
        help="measure the recovery of a killed worker too, in rounds of their own",
    )
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    arguments = parser.parse_args()
    undisturbed: dict[str, list[Figures]] = {name: [] for name in arguments.contestants}
    killed: dict[str, list[Figures]] = {name: [] for name in arguments.contestants}
    for _ in range(arguments.rounds):
        for name in arguments.contestants:
            for with_kill in (False, True) if arguments.kill else (False,):
                result = measure(CONTESTANTS[name], with_kill)
                (killed if with_kill else undisturbed)[name].append(result)
                suffix = ", worker killed" if with_kill else ""
                print(f"{CONTESTANTS[name].name}{suffix}: {result}", flush=True)
    recovery_rows = [row for row in rows_of(killed) if str(row[0]).startswith("killed")]
    columns = ["median (range)", *(CONTESTANTS[name].name for name in undisturbed), "ratio"]
    table = markdown_table(columns, rows_of(undisturbed) + recovery_rows)
    publish(header("Two workers: start, step, recovery", arguments) + table, arguments.out)


if __name__ == "__main__":
    main()
