"""Data-parallel training on two workers: from the command to the first step, per step, and back after a killed worker.

A plain Ray Train job in the form of Ray's documentation (``plain_ray_train.py``: an MLP on the digits, ``ray.train.report``
at every step) against ``orchestrator train`` on the digits, both with a global batch of 64 on a Ray of their own. Rounds
alternate; medians are compared. With ``--kill``, worker 1 is killed (SIGKILL) some steps after a checkpoint; both write one
every 10 steps.

    python -m benchmarks.ray_start [--rounds 3] [--kill] [--contestants plain ours] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.support import header, markdown_table, write_result
from orchestrator.record.events import read_events

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
KILL_AT = 15  # a checkpoint every 10 steps: five are lost
KILLED_RANK = 1
LONGEST_S = 600.0


@dataclass(frozen=True)
class Mark:
    """A step that was done: its number, when, how long it took where told, and by which life of the workers."""

    step: int
    time: float
    seconds: float | None
    life: int


@dataclass(frozen=True)
class Figures:
    """Seconds."""

    first_step: float
    per_step: float
    total: float
    next_step: float | None = None
    new_step: float | None = None


@dataclass(frozen=True)
class Contestant:
    name: str
    command: Callable[[Path, int, bool], list[str]]
    steps: int
    steps_when_killed: int
    marks: Callable[[Path], list[Mark]]
    pid_file: str


def plain_command(folder: Path, steps: int, kill: bool) -> list[str]:
    script = str(ROOT / "benchmarks" / "plain_ray_train.py")
    return [sys.executable, script, str(folder), str(steps), "--checkpoint-every", "10" if kill else "0"]


def our_command(folder: Path, steps: int, kill: bool) -> list[str]:
    flags = {
        "--parallel-strategy": "data_parallel", "--workers": "2", "--task": "digits", "--max-steps": str(steps), "--epochs": "100000",
        "--global-batch-size": "64", "--ray-address": "local", "--run-dir": str(folder / "run"),
    }  # fmt: skip
    flags |= {"--checkpoint-every": "10"} if kill else {}
    return [sys.executable, "-m", "orchestrator", "train", *(part for flag in flags.items() for part in flag)]


def plain_marks(folder: Path) -> list[Mark]:
    path = folder / "steps.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    lives = list(dict.fromkeys(row["pid"] for row in rows))
    return [Mark(row["step"], row["time"], None, lives.index(row["pid"])) for row in rows]


def our_marks(folder: Path) -> list[Mark]:
    """A life ends with a recovery that is told before its start, or with a start."""
    marks: list[Mark] = []
    life, told = 0, True
    for event in read_events(folder / "run" / "events.jsonl"):
        if event["event"] == "step":
            marks.append(
                Mark(event["step"], event["time"], None if event.get("warm_up") else event["seconds"], life)
            )
            told = False
        elif event["event"] in ("start", "recovery") and not told:
            life, told = life + 1, True
    return marks


CONTESTANTS = {
    "plain": Contestant("plain Ray Train", plain_command, 30, 30, plain_marks, "worker_{rank}.pid"),
    "ours": Contestant("orchestrator", our_command, 200, 2000, our_marks, "run/logs/worker_{rank}.pid"),
}


def measure(contestant: Contestant, kill: bool) -> Figures:
    steps = contestant.steps_when_killed if kill else contestant.steps
    with tempfile.TemporaryDirectory(prefix="ray-start-") as name:
        folder = Path(name)
        begun = time.time()
        with started(contestant.command(folder, steps, kill), folder) as process:
            killed = kill_a_worker(contestant, folder, process) if kill else None
            code = process.wait(LONGEST_S)
        total = time.time() - begun
        marks = contestant.marks(folder)
        if code != 0 or not marks or marks[-1].step < steps:
            done = marks[-1].step if marks else 0
            raise RuntimeError(
                f"{contestant.name} ended with code {code} after {done} of {steps} steps:\n{tail(folder)}"
            )
    return figures(marks, begun, total, killed)


def figures(marks: list[Mark], begun: float, total: float, killed: float | None) -> Figures:
    first_life = [mark for mark in marks if mark.life == 0]
    told = [mark.seconds for mark in first_life if mark.seconds is not None]
    between = [
        after.time - before.time
        for before, after in zip(first_life[WARM_UP:], first_life[WARM_UP + 1 :], strict=False)
    ]
    next_step = new_step = None
    if killed is not None:
        later = [mark for mark in marks if mark.life > 0]
        highest = max(mark.step for mark in first_life)
        next_step = next((mark.time - killed for mark in later), None)
        new_step = next((mark.time - killed for mark in later if mark.step > highest), None)
    return Figures(marks[0].time - begun, statistics.median(told or between), total, next_step, new_step)


def kill_a_worker(contestant: Contestant, folder: Path, process: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + LONGEST_S
    while not any(mark.step >= KILL_AT for mark in contestant.marks(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{contestant.name} did not reach step {KILL_AT}:\n{tail(folder)}")
        time.sleep(0.005)
    pid = int((folder / contestant.pid_file.format(rank=KILLED_RANK)).read_text())
    if os.getsid(pid) != process.pid and process.pid not in [
        parent.pid for parent in psutil.Process(pid).parents()
    ]:
        raise RuntimeError(f"{pid} is no process of {contestant.name}: not killed")
    os.kill(pid, signal.SIGKILL)
    return time.time()


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; what is left of that session is ended, and nothing else."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    offspring: dict[int, psutil.Process] = {}
    try:
        yield process
    finally:
        with suppress(psutil.Error):
            offspring = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        end(process, offspring)


def end(process: subprocess.Popen[bytes], offspring: dict[int, psutil.Process]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    left = [
        *offspring.values(),
        *(other for other in psutil.process_iter() if _session(other.pid) == process.pid),
    ]
    for other in left:
        with suppress(psutil.Error):
            other.kill()  # psutil knows a process by its birth too: a number that was given again is left alone
    process.wait()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def tail(folder: Path) -> str:
    return (folder / "output.txt").read_text(errors="replace")[-3000:]


def rows_of(results: dict[str, list[Figures]]) -> list[list[object]]:
    labels = {
        "first_step": "command to the first step, s",
        "per_step": "a step after warm-up, ms (plain: with its report, which waits for Ray's poll)",
        "total": f"command to exit, s ({' / '.join(f'{name} {CONTESTANTS[name].steps} steps' for name in results)})",
        "next_step": "killed worker to the next step, s",
        "new_step": "killed worker to the first step that is new, s",
    }
    rows: list[list[object]] = []
    for field, label in labels.items():
        found = {
            name: [value for one in many if (value := getattr(one, field)) is not None]
            for name, many in results.items()
        }
        if all(found.values()):
            rows.append([label, *_cells(found, 1000.0 if field == "per_step" else 1.0)])
    return rows


def _cells(found: dict[str, list[float]], scale: float) -> list[str]:
    """Median and range of each, and how many times the first takes of the last."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    cells = [
        f"{medians[name] * scale:.2f} ({min(values) * scale:.2f}–{max(values) * scale:.2f})"
        for name, values in found.items()
    ]
    first, *_, last = [*medians.values(), None] if len(medians) == 1 else [*medians.values()]
    return [*cells, f"{first / last:.2f}" if first and last else "–"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kill",
        action="store_true",
        help="measure the recovery of a killed worker too, in rounds of their own",
    )
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[Figures]] = {name: [] for name in arguments.contestants}
    killed: dict[str, list[Figures]] = {name: [] for name in arguments.contestants}
    for _ in range(arguments.rounds):
        for name in arguments.contestants:
            for kill in (False, True) if arguments.kill else (False,):
                found = measure(CONTESTANTS[name], kill)
                (killed if kill else results)[name].append(found)
                print(f"{CONTESTANTS[name].name}{', worker killed' if kill else ''}: {found}", flush=True)
    rows = rows_of(results) + [row for row in rows_of(killed) if str(row[0]).startswith("killed")]
    columns = ["median (range)", *(CONTESTANTS[name].name for name in results), "ratio"]
    text = header("Two workers: start, step, recovery", arguments) + markdown_table(columns, rows)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
