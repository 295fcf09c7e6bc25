"""Data-parallel training that loses a worker: the parts of the time from the kill to the next step.

    python -m benchmarks.recovery.dp_restart [--kills 3] [--life 30] [--workers 2] [--checkpoint-every 20]
    [--rank 1] [--out FILE]

One run on the digits, on its own Ray. A worker is killed (SIGKILL, by the process id in
``logs/worker_<rank>.pid``) ``--life`` seconds after every start of the workers. The times come from
the run's own events, from the files that workers write when they begin, and from the creation times
of their processes. Processes that existed before the decision cost nothing, which is shown as a
dash.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.processes import LONGEST_S, belongs_to, kill, started, wait_until
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.types import MIB

STEPS = 45  # of one life of the workers at least: past two checkpoints
PARTS = {
    "detected": "killed → the driver knows (Ray notices, ends the group, `fit` returns)",
    "decided": "→ decided what to do (slots counted, failure written)",
    "begun": "→ both workers run our code (controller, placement group, processes, imports)",
    "met": "→ met, the group is formed",
    "restored": "→ model built, checkpoint read",
    "stepped": "→ first step done",
}
CREATION = "of it: decided → last worker's process is born"


@dataclass(frozen=True)
class Times:
    """The times of one kill and of the recovery from it, in Unix seconds."""

    killed: float
    detected: float
    decided: float
    begun: float
    met: float
    restored: float
    stepped: float
    lost_steps: int
    step_ms: float
    """A warm step before the kill."""
    created: float
    """When the last of the new workers' processes was created."""

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, by its end."""
        names = ["killed", *PARTS]
        return {after: getattr(self, after) - getattr(self, before) for before, after in pairwise(names)}

    def total(self) -> float:
        return self.stepped - self.killed


def command(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    flags = {
        "--parallel-strategy": "data_parallel",
        "--task": "digits",
        "--ray-address": "local",
        "--epochs": "1000000",
        "--workers": arguments.workers,
        "--checkpoint-every": arguments.checkpoint_every,
        "--max-failures": arguments.kills + 1,
        "--run-dir": run_dir,
    }
    words = [str(part) for flag in flags.items() for part in flag]
    return [sys.executable, "-m", "orchestrator", "train", "--deterministic", *words]


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[Times], list[int]]:
    """Return the times of every kill, and the memory of the run's processes before each."""
    run_dir = folder / "run"
    recoveries: list[Times] = []
    memory_bytes: list[int] = []
    with started(command(arguments, run_dir), folder) as process:
        for _ in range(arguments.kills):
            wait_until(lambda: _has_lived(run_dir, arguments.life), process, folder, poll_s=0.2)
            memory_bytes.append(memory_of(process))
            recoveries.append(kill_once(process, folder, arguments))
            parts = {name: round(seconds, 2) for name, seconds in recoveries[-1].parts().items()}
            print(f"{recoveries[-1].total():.2f} s: {parts}", flush=True)
        # the run would train for ever: an interrupt ends it as a user would
        process.send_signal(signal.SIGINT)
        process.wait(LONGEST_S)
    return recoveries, memory_bytes


def kill_once(process: subprocess.Popen[bytes], folder: Path, arguments: argparse.Namespace) -> Times:
    """Kill the worker, and wait for the recovery."""
    run_dir = folder / "run"
    before = _num_recoveries(run_dir)
    pid = int((run_dir / "logs" / f"worker_{arguments.rank}.pid").read_text())
    killed = kill(pid, process)
    wait_until(lambda: _num_recoveries(run_dir) > before, process, folder, poll_s=0.2)
    return times_of(run_dir, killed, arguments.workers)


def _num_recoveries(run_dir: Path) -> int:
    return len(of_kind(read_events(run_dir / "events.jsonl"), "recovery"))


def times_of(run_dir: Path, killed: float, workers: int) -> Times:
    """Return the times of the last recovery."""
    events = read_events(run_dir / "events.jsonl")
    recovery = of_kind(events, "recovery")[-1]
    failure = of_kind(events, "failure")[-1]
    restart = events.index(of_kind(events, "start")[-1])
    stepped = of_kind(events[restart:], "step")[0]["time"]
    detected = stepped - recovery["total_seconds"] + recovery["detect_seconds"]
    met = detected + recovery["regroup_seconds"]
    pid_files = [run_dir / "logs" / f"worker_{rank}.pid" for rank in range(workers)]
    created = [psutil.Process(int(file.read_text())).create_time() for file in pid_files]
    return Times(
        killed=killed,
        detected=detected,
        decided=failure["time"],
        begun=max(file.stat().st_mtime for file in pid_files),
        met=met,
        restored=met + recovery["restore_seconds"],
        stepped=stepped,
        lost_steps=recovery["lost_steps"],
        step_ms=step_ms(events),
        created=max(created),
    )


def step_ms(events: Sequence[Event]) -> float:
    """Return the median of the last quarter of the steps before the last failure.

    Neither the start of the run nor the preloading of the next workers disturbs them.
    """
    ends = [number for number, event in enumerate(events) if event["event"] == "failure"]
    begin = ends[-2] if len(ends) > 1 else 0
    seconds = [event["seconds"] for event in events[begin : ends[-1]] if event["event"] == "step"]
    quarter = len(seconds) // 4 or 1
    return 1000 * statistics.median(seconds[-quarter:])


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """Return the memory of all processes of the run, in bytes; shared pages count once (PSS)."""
    total = 0
    for other in psutil.process_iter():
        if belongs_to(other.pid, process.pid):
            try:
                total += other.memory_full_info().pss
            except psutil.Error:
                continue
    return total


def _has_lived(run_dir: Path, seconds: float) -> bool:
    """Report whether the workers have trained for so long, and for enough steps, since they last began."""
    times: list[float] = []
    for event in read_events(run_dir / "events.jsonl"):
        if event["event"] == "failure":
            times = []
        elif event["event"] == "step" and len(times) < STEPS:
            times.append(event["time"])
    return len(times) >= STEPS and time.time() - times[0] > seconds


def table(recoveries: Sequence[Times], memory_bytes: Sequence[int]) -> str:
    rows: list[list[object]] = []
    for name, label in PARTS.items():
        rows.append([label, spread([times.parts()[name] for times in recoveries])])
        if name == "begun":
            creation = [max(0.0, times.created - times.decided) for times in recoveries]
            rows.append([CREATION, spread(creation)])
    total = spread([times.total() for times in recoveries])
    memory = statistics.median(memory_bytes) / MIB
    summary: list[list[object]] = [
        ["**killed → first step done**", f"**{total}**"],
        ["a step before the kill, ms", spread([times.step_ms for times in recoveries])],
        ["steps lost, to be done again", spread([float(times.lost_steps) for times in recoveries])],
        ["memory of all processes of the run before a kill, MiB (shared pages once)", f"{memory:.0f}"],
    ]
    return markdown_table([f"seconds, median of {len(recoveries)} (range)", ""], [*rows, *summary])


def spread(values: Sequence[float]) -> str:
    """Return median and range, or a dash where all values are zero."""
    if max(values) == 0:
        return "–"
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--life", type=float, default=30.0, help="seconds of work before each kill")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--rank", type=int, default=1, help="the worker to kill")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dp-restart-") as name:
        recoveries, memory_bytes = measure(arguments, Path(name))
    text = header("A data-parallel worker is killed", arguments) + table(recoveries, memory_bytes)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
