"""A run on hosts of experts, from its start to its end, with the faults of a schedule; and the same one left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from orchestrator.config.outputs import CheckpointSettings
from orchestrator.config.parallel import ParallelSettings
from orchestrator.record.events import Event, read_events
from tests.support.cluster import Cluster
from tests.support.fault_injector import Injector
from tests.support.faults import Fired, Post, Schedule
from tests.support.process_watch import Watch, leaking
from tests.support.run_checks import left_in, left_memory, left_processes, shared_memory, wrong_run

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 1438  # of the digits' 1,797 that are trained on
MODEL = [
    "--width",
    "32",
    "--layers",
    "2",
    "--experts",
    "6",
    "--expert-hidden-size",
    "32",
    "48",
    "32",
    "64",
    "32",
    "48",
]
SETTINGS = [
    "--task", "tests.support.faulty_task:Faulty", "--parallel-strategy", "expert_parallel", "--deterministic", *MODEL,
    "--placement", "round_robin", "--share-by-speed", "off", "--global-batch-size", "96", "--epochs", "1000000", "--log-every", "1",
    "--evaluate-every", "100", "--trackers", "--no-monitor-gpu", "--learning-rate", "1e-3", "--max-failures", "1000",
]  # fmt: skip


def known(*flags: str) -> list[str]:
    """Those of the flags (each with its value) that the product has."""
    names = {field.name for settings in (ParallelSettings, CheckpointSettings) for field in fields(settings)}
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [
        part
        for flag, value in pairs
        if flag.removeprefix("--").replace("-", "_") in names
        for part in (flag, value)
    ]


@dataclass(frozen=True)
class Job:
    """What is run, and where: on a cluster, or on a Ray of its own."""

    steps: int
    hosts: int = 3
    spares: int = 1
    snapshot_every: int = 10
    checkpoint_every: int = 20
    collective_timeout: int = 10
    extra: tuple[str, ...] = ()
    here: Cluster | None = None
    pace: float = 0.0
    """Seconds that a host sleeps in each step: as if a GPU worked for it, and the cores were free."""

    def command(self, run_dir: Path) -> list[str]:
        live = known("--spares", str(self.spares), "--snapshot-every", str(self.snapshot_every))
        flags = {
            "--run-dir": str(run_dir), "--workers": str(self.hosts), "--max-steps": str(self.steps),
            "--checkpoint-every": str(self.checkpoint_every), "--collective-timeout": str(self.collective_timeout),
            "--ray-address": self.here.address if self.here else "local",
        }  # fmt: skip
        given = [part for flag in flags.items() for part in flag]
        return [sys.executable, "-m", "orchestrator", "train", *SETTINGS, *given, *live, *self.extra]

    def environment(self) -> dict[str, str]:
        given = self.here.environment if self.here else os.environ
        return {**given, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])}


@dataclass(frozen=True)
class Ended:
    """A run that is over. ``left`` says what it left behind."""

    run_dir: Path
    code: int
    output: str
    events: list[Event]
    fired: list[Fired]
    left: list[str]
    watch: Watch

    def wrong(self, calm: Ended, steps: int) -> list[str]:
        """What is wrong with it, against the undisturbed one: nothing, if it shrugged all faults off."""
        if self.code:
            return [f"ended with code {self.code}: {self.output[-2000:]}"]
        return [*wrong_run(self.run_dir, calm.run_dir, steps, SAMPLES), *self.left, *self.leaking(calm)]

    def leaking(self, calm: Ended) -> list[str]:
        return leaking(self.watch, calm.watch, [one.time for one in self.fired])


@contextmanager
def started(job: Job, run_dir: Path, *extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """The driver's process, in a session of its own."""
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


def disturbed(job: Job, run_dir: Path, schedule: Schedule, *extra: str, timeout: float = 600) -> Ended:
    """Run to the end under a schedule; an empty one leaves it in peace. TimeoutError where it does not end."""
    post, memory = Post.beside(run_dir), shared_memory()
    post.lay_out(schedule, job.pace)
    with started(job, run_dir, *extra) as process:
        roots = frozenset({process.pid, *(node.pid for node in (job.here.nodes if job.here else []))})
        with (
            Watch(process.pid, run_dir) as watch,
            Injector(run_dir, schedule, job.hosts, process.pid, roots, job.here),
        ):
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"{run_dir} did not end within {timeout} s:\n{output_of(run_dir)[-3000:]}"
                ) from None
    fired = post.fired()
    left = [*left_processes(watch.readings), *left_memory(memory)]
    left += left_in(job.here) if job.here else []
    return Ended(
        run_dir,
        process.returncode,
        output_of(run_dir),
        read_events(run_dir / "events.jsonl"),
        fired,
        left,
        watch,
    )


def output_of(run_dir: Path) -> str:
    return run_dir.with_name(f"{run_dir.name}.txt").read_text(encoding="utf-8", errors="replace")
