"""Data-parallel training that loses a worker: where the seconds go from the kill to the next step, part by part.

    python -m benchmarks.dp_restart [--kills 3] [--life 30] [--workers 2] [--checkpoint-every 20] [--rank 1] [--out FILE]

One run on the digits, on a Ray of its own. A worker is killed (SIGKILL, by the number in ``logs/worker_<rank>.pid``) ``--life``
seconds after every start of the workers. The moments come from the run's own events, from the files that workers write when they
begin, and from the births of their processes: those that were there before the decision cost nothing, which is shown as a dash.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ray_start import LONGEST_S, started, tail
from benchmarks.support import header, markdown_table, write_result
from orchestrator.record.events import of_kind, read_events
from orchestrator.types import MIB

STEPS = 45  # of one life of the workers at least: past two checkpoints
PARTS = {
    "told": "killed → the driver knows (Ray notices, ends the group, `fit` returns)",
    "decided": "→ decided what to do (slots counted, failure written)",
    "begun": "→ both workers run our code (controller, placement group, processes, imports)",
    "met": "→ met, the group is formed",
    "restored": "→ model built, checkpoint read",
    "stepped": "→ first step done",
}
BIRTH = "of it: decided → last worker's process is born"


@dataclass(frozen=True)
class Moments:
    """Of one kill and what came of it, in unix seconds."""

    killed: float
    told: float
    decided: float
    begun: float
    met: float
    restored: float
    stepped: float
    lost_steps: int
    step_ms: float
    """A step of the life that was ended, once warm."""
    born: float

    def parts(self) -> dict[str, float]:
        names = ["killed", *PARTS]
        return {after: getattr(self, after) - getattr(self, before) for before, after in pairwise(names)}

    def total(self) -> float:
        return self.stepped - self.killed


def command(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    flags = {
        "--parallel-strategy": "data_parallel", "--task": "digits", "--ray-address": "local", "--epochs": "1000000",
        "--workers": arguments.workers, "--checkpoint-every": arguments.checkpoint_every, "--max-failures": arguments.kills + 1,
        "--run-dir": run_dir,
    }  # fmt: skip
    return [
        sys.executable,
        "-m",
        "orchestrator",
        "train",
        "--deterministic",
        *(str(part) for flag in flags.items() for part in flag),
    ]


def measured(arguments: argparse.Namespace, folder: Path) -> tuple[list[Moments], list[int]]:
    """Every kill's moments, and what the processes of the run held in memory before each."""
    run_dir = folder / "run"
    with started(command(arguments, run_dir), folder) as process:
        found, held = [], []
        for _ in range(arguments.kills):
            wait_for(process, folder, lambda: _lived(run_dir, arguments.life))
            held.append(resident(process))
            found.append(one_kill(process, folder, arguments))
            print(
                f"{found[-1].total():.2f} s: { {name: round(seconds, 2) for name, seconds in found[-1].parts().items()} }",
                flush=True,
            )
        process.send_signal(signal.SIGINT)
        process.wait(LONGEST_S)
    return found, held


def one_kill(process: subprocess.Popen[bytes], folder: Path, arguments: argparse.Namespace) -> Moments:
    run_dir = folder / "run"
    before = len(of_kind(read_events(run_dir / "events.jsonl"), "recovery"))
    pid = int((run_dir / "logs" / f"worker_{arguments.rank}.pid").read_text())
    if (
        process.pid not in [parent.pid for parent in psutil.Process(pid).parents()]
        and os.getsid(pid) != process.pid
    ):
        raise RuntimeError(f"{pid} is no process of the run: not killed")
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    wait_for(
        process, folder, lambda: len(of_kind(read_events(run_dir / "events.jsonl"), "recovery")) > before
    )
    return moments(run_dir, killed, arguments.workers)


def moments(run_dir: Path, killed: float, workers: int) -> Moments:
    events = read_events(run_dir / "events.jsonl")
    told, failure = of_kind(events, "recovery")[-1], of_kind(events, "failure")[-1]
    detected = told["time"] - told["total_seconds"] + told["detect_seconds"]
    met = detected + told["regroup_seconds"]
    files = [run_dir / "logs" / f"worker_{rank}.pid" for rank in range(workers)]
    births = [psutil.Process(int(file.read_text())).create_time() for file in files]
    return Moments(
        killed, detected, failure["time"], max(file.stat().st_mtime for file in files), met, met + told["restore_seconds"],
        told["time"], told["lost_steps"], step_ms(events), max(births),
    )  # fmt: skip


def step_ms(events: Sequence[dict[str, Any]]) -> float:
    """The last quarter of the steps before the last failure: neither start nor successors are at work beside them."""
    ends = [number for number, event in enumerate(events) if event["event"] == "failure"]
    begin = ends[-2] if len(ends) > 1 else 0
    taken = [event["seconds"] for event in events[begin : ends[-1]] if event["event"] == "step"]
    return 1000 * statistics.median(taken[-(len(taken) // 4 or 1) :])


def offspring(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [other for other in psutil.process_iter() if _of(other, process.pid)]


def _of(other: psutil.Process, root: int) -> bool:
    try:
        return os.getsid(other.pid) == root or root in [parent.pid for parent in other.parents()]
    except (OSError, psutil.Error):
        return False


def resident(process: subprocess.Popen[bytes]) -> int:
    total = 0
    for other in offspring(process):
        try:
            total += other.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def _lived(run_dir: Path, seconds: float) -> bool:
    """Whether the workers have been at work for so long since they last began."""
    times: list[float] = []
    for event in read_events(run_dir / "events.jsonl"):
        if event["event"] in ("failure", "step"):
            times = (
                []
                if event["event"] == "failure"
                else [*times, event["time"]]
                if len(times) < STEPS
                else times
            )
    return len(times) >= STEPS and time.time() - times[0] > seconds


def wait_for(process: subprocess.Popen[bytes], folder: Path, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not until():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run came to nothing:\n{tail(folder)}")
        time.sleep(0.2)


def table(found: Sequence[Moments], held: Sequence[int]) -> str:
    rows: list[list[object]] = []
    for name, label in PARTS.items():
        rows.append([label, spread([one.parts()[name] for one in found])])
        if name == "begun":
            rows.append([BIRTH, spread([max(0.0, one.born - one.decided) for one in found])])
    rows.append(["**killed → first step done**", f"**{spread([one.total() for one in found])}**"])
    rows.append(["a step before the kill, ms", spread([one.step_ms for one in found])])
    rows.append(["steps lost, to be done again", spread([float(one.lost_steps) for one in found])])
    rows.append(
        [
            "memory of all processes of the run before a kill, MiB (shared pages once)",
            f"{statistics.median(held) / MIB:.0f}",
        ]
    )
    return markdown_table([f"seconds, median of {len(found)} (range)", ""], rows)


def spread(values: Sequence[float]) -> str:
    return (
        "–" if max(values) == 0 else f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--life", type=float, default=30.0, help="seconds of work before each kill")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--rank", type=int, default=1, help="whom to kill")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dp-restart-") as name:
        found, held = measured(arguments, Path(name))
    text = header("A data-parallel worker is killed", arguments) + table(found, held)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
