"""Where the time goes from the command to the first step on two workers, by process.

Starts ``orchestrator train --workers 2`` on a Ray of its own, data parallel and expert parallel,
and reads the CPU time of each of its processes until the first step is recorded. Wall time depends
on who else uses the machine; CPU time much less. ``--trees`` compares several checkouts of the
project, one after the other in each round.

    python -m benchmarks.startup.start [--rounds 3] [--trees FOLDER FOLDER] [--processes] [--out FILE]
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.processes import LONGEST_S, ROOT, end, tail
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import read_events

STRATEGIES = ("data_parallel", "expert_parallel")
_SAMPLE_S = 0.1
_KINDS = (
    ("raylet", "raylet"),
    ("gcs_server", "GCS"),
    ("log_monitor", "log monitor"),
    ("autoscaler/_private/monitor", "autoscaler"),
    ("runtime_env/agent", "runtime environment agent"),
    ("ray::RuntimeEnvAgent", "runtime environment agent"),
    ("dashboard/agent", "dashboard agent"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("dashboard/dashboard", "dashboard"),
    ("default_worker", "worker processes"),
    ("ray::", "worker processes"),
    ("orchestrator", "driver"),
)


@dataclass
class Seen:
    """A process of a run, as it was last seen before the first step."""

    kind: str
    title: str
    began_s: float
    """Seconds from the command to its start."""
    cpu_s: float


@dataclass(frozen=True)
class Start:
    """The start of one run."""

    wall_s: float
    processes: list[Seen]

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self.processes)

    def cpu_of(self, kind: str) -> float:
        return sum(process.cpu_s for process in self.processes if process.kind == kind)


def command(strategy: str, run_dir: Path) -> list[str]:
    flags = {
        "--parallel-strategy": strategy,
        "--workers": "2",
        "--task": "digits",
        "--experts": "4" if strategy == "expert_parallel" else "0",
        "--max-steps": "100000",
        "--epochs": "100000",
        "--global-batch-size": "64",
        "--ray-address": "local",
        "--run-dir": str(run_dir),
    }
    return [sys.executable, "-m", "orchestrator", "train", *(part for flag in flags.items() for part in flag)]


def measure(tree: Path, strategy: str) -> Start:
    """Start a run of a checkout, and interrupt it after its first step."""
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        run_dir = folder / "run"
        began = time.time()
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command(strategy, run_dir),
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        children: list[psutil.Process] = []
        try:
            seen, first_step = _watch(process, run_dir, began)
            with suppress(psutil.Error):
                children = psutil.Process(process.pid).children(recursive=True)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            end(process, children)
        if first_step is None:
            raise RuntimeError(f"the run ended before its first step:\n{tail(folder)}")
    return Start(first_step - began, seen)


def _watch(process: subprocess.Popen[bytes], run_dir: Path, began: float) -> tuple[list[Seen], float | None]:
    """Sample the processes of a run until its first step; return them, and the time of the step."""
    seen: dict[int, Seen] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None and time.time() - began < LONGEST_S:
        with suppress(psutil.Error):
            for member in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    _sample(member, seen, began)
        steps = [event for event in _events(run_dir) if event["event"] == "step"]
        if steps:
            return list(seen.values()), steps[0]["time"]
        time.sleep(_SAMPLE_S)
    return list(seen.values()), None


def _events(run_dir: Path) -> list[Event]:
    path = run_dir / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _sample(member: psutil.Process, seen: dict[int, Seen], began: float) -> None:
    times = member.cpu_times()
    title = " ".join(member.cmdline())
    kind = next((kind for pattern, kind in _KINDS if pattern in title), "other")
    if kind == "other":
        return  # a child that has not replaced its program yet
    short = re.sub(r"^\S*python\S*( -u)?( \S*/)?", "", title)[:60]
    seen[member.pid] = Seen(kind, short, member.create_time() - began, times.user + times.system)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--processes", action="store_true", help="print each process of each run")
    arguments = parser.parse_args()
    results: dict[tuple[str, Path], list[Start]] = {}
    for _ in range(arguments.rounds):
        for strategy in arguments.strategies:
            for tree in arguments.trees:
                start = measure(tree.resolve(), strategy)
                results.setdefault((strategy, tree), []).append(start)
                print(f"{strategy} {tree}: {start.wall_s:.1f} s, CPU {start.cpu_s:.1f} s", flush=True)
                for process in sorted(start.processes, key=lambda p: p.began_s) * arguments.processes:
                    print(f"  from {process.began_s:5.1f} s  CPU {process.cpu_s:5.2f} s  {process.title}")
    kinds = list(dict.fromkeys(kind for _, kind in _KINDS))
    columns = ["median (range), s", *(f"{strategy}, {tree.name}" for strategy, tree in results)]
    rows: list[list[object]] = [
        ["command to the first step", *(_cell([s.wall_s for s in many]) for many in results.values())],
        ["CPU time until then", *(_cell([s.cpu_s for s in many]) for many in results.values())],
    ]
    by_kind: list[list[object]] = [
        [f"… {kind}", *(_cell([start.cpu_of(kind) for start in starts]) for starts in results.values())]
        for kind in kinds
    ]
    rows += by_kind
    title = header("Two workers: from the command to the first step", arguments)
    publish(title + markdown_table(columns, rows), arguments.out)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


if __name__ == "__main__":
    main()
