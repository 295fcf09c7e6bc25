"""Runs on expert hosts under a schedule of faults, and the same runs undisturbed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.faults.fault_injector import FaultInjector
from harness.faults.fault_schedule import FaultFolder, FaultSchedule, FiredFault
from harness.faults.faulty_task import SAMPLES
from harness.faults.process_watch import ProcessWatch, find_leaks
from harness.faults.run_checks import (
    check_run,
    leftover_processes,
    leftover_shared_memory,
    leftovers_in_cluster,
    shared_memory,
)
from harness.hosts.cluster import RayCluster
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import read_events

ROOT = Path(__file__).resolve().parents[2]
_COMMON = shlex.split("""
    --deterministic --share-by-speed off --global-batch-size 96 --epochs 1000000 --log-every 1
    --evaluate-every 100 --trackers --no-monitor-gpu --learning-rate 1e-3 --max-failures 1000
""")
_EXPERTS = shlex.split("""
    --task harness.faults.faulty_task:FaultyDigits --parallel-strategy expert_parallel --placement round_robin
    --width 32 --layers 2 --experts 6 --expert-hidden-size 32 48 32 64 32 48
""")
SETTINGS = [*_COMMON, *_EXPERTS]
_DENSE = shlex.split("""
    --task harness.faults.faulty_task:FaultyText --parallel-strategy data_parallel --recovery live
    --experts 0 --width 64 --layers 4 --sequence-length 16
""")
DENSE_SETTINGS = [*_COMMON, *_DENSE]
"""A dense language model like GPT-2, on hosts."""
EVOLVING = shlex.split("""
    --evolution bold --rebalance on --sleep-every 8 --birth-entropy 0.1 --birth-patience 1 --newborn-warmup 6
    --merge-similarity 0.0 --change-tolerance 0.37 --max-experts 9 --global-batch-size 192
""")
"""Settings with which experts change in all ways from step 56 on, and a merge is undone. The batch gives each
window enough tokens for a decision."""


@dataclass(frozen=True)
class Job:
    """The settings of a run, and its cluster; without one it starts a Ray of its own."""

    steps: int
    hosts: int = 3
    spares: int = 1
    snapshot_every: int = 10
    checkpoint_every: int = 20
    collective_timeout: int = 10
    extra: tuple[str, ...] = ()
    settings: tuple[str, ...] = tuple(SETTINGS)
    """The flags of the task; faults inside a step need a task that carries them out."""
    cluster: RayCluster | None = None
    pace_s: float = 0.0
    """How long a host sleeps in each step, as if a GPU worked for it and the cores were free."""

    def command(self, run_dir: Path) -> list[str]:
        flags = {
            "--run-dir": run_dir,
            "--workers": self.hosts,
            "--max-steps": self.steps,
            "--checkpoint-every": self.checkpoint_every,
            "--collective-timeout": self.collective_timeout,
            "--spares": self.spares,
            "--snapshot-every": self.snapshot_every,
            "--ray-address": self.cluster.address if self.cluster else "local",
            "--plots": "off",
        }
        arguments = [str(part) for flag in flags.items() for part in flag]
        return [sys.executable, "-m", "orchestrator", "train", *self.settings, *arguments, *self.extra]

    def environment(self) -> dict[str, str]:
        environment = self.cluster.environment if self.cluster else os.environ
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, and what it left behind."""

    run_dir: Path
    exit_code: int
    output: str
    events: list[Event]
    fired: list[FiredFault]
    leftovers: list[str]
    watch: ProcessWatch

    def problems(self, calm: FinishedRun, steps: int) -> list[str]:
        """Return the differences from the undisturbed run that the faults must not cause."""
        if self.exit_code:
            return [f"ended with code {self.exit_code}: {self.output[-2000:]}"]
        return [
            *check_run(self.run_dir, calm.run_dir, steps, SAMPLES),
            *self.leftovers,
            *self.leaks(calm),
        ]

    def leaks(self, calm: FinishedRun) -> list[str]:
        return find_leaks(self.watch, calm.watch, [fault.time for fault in self.fired])


@contextmanager
def started_driver(job: Job, run_dir: Path, *extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the driver in a session of its own; kill it at the end if it still runs."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_name(f"{run_dir.name}.txt").open("ab") as output:
        process = subprocess.Popen(
            [*job.command(run_dir), *extra],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=job.environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_with_faults(
    job: Job, run_dir: Path, schedule: FaultSchedule, *extra: str, timeout: float = 600
) -> FinishedRun:
    """Run to the end under a schedule; an empty one leaves the run undisturbed."""
    folder = FaultFolder.of_run(run_dir)
    memory_before = shared_memory()
    folder.write(schedule, job.pace_s)
    with started_driver(job, run_dir, *extra) as process:
        raylets = [node.pid for node in job.cluster.nodes] if job.cluster else []
        roots = frozenset({process.pid, *raylets})
        injector = FaultInjector(run_dir, schedule, job.hosts, process.pid, roots, job.cluster)
        with ProcessWatch(process.pid, run_dir) as watch, injector:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                output = output_of(run_dir)[-3000:]
                raise TimeoutError(f"{run_dir} did not end within {timeout} s:\n{output}") from None
    fired = folder.fired()
    leftovers = [*leftover_processes(watch.readings), *leftover_shared_memory(memory_before)]
    if job.cluster:
        leftovers += leftovers_in_cluster(job.cluster)
    events = read_events(run_dir / "events.jsonl")
    return FinishedRun(run_dir, process.returncode, output_of(run_dir), events, fired, leftovers, watch)


def output_of(run_dir: Path) -> str:
    return run_dir.with_name(f"{run_dir.name}.txt").read_text(encoding="utf-8", errors="replace")
