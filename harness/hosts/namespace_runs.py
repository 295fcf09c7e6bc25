"""Runs on nodes of their own that are disturbed from outside, and the same runs undisturbed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.hosts.namespace_cluster import NamespaceCluster, wait_until
from harness.hosts.namespaces import Node, end
from harness.runs.cli_runs import read_summary
from harness.runs.records import by_step
from harness.storage.object_server import BUCKET
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events

STEPS = 36
TOLERANCE = 1e-5
CUT_SECONDS = 15
_DISTURBED_STEP = 6
_CLOCK_SECONDS = 3600.0
_LONGEST_RECOVERY_SECONDS = 600.0
SETTINGS = shlex.split(f"""
    --task harness.runs.paced_digits:PacedDigits --workers 3 --deterministic --max-steps {STEPS}
    --width 16 --layers 1 --experts 7 --expert-hidden-size 8 16 8 8 16 8 8 --global-batch-size 50
    --learning-rate 1e-3 --schedule constant --log-every 1 --evaluate-every 1000 --checkpoint-every 10
    --trackers --no-monitor-gpu
""")
STRATEGIES = {
    "expert parallel": shlex.split("--parallel-strategy expert_parallel --snapshot-every 10"),
    "data parallel": shlex.split("--parallel-strategy data_parallel"),
}


@dataclass
class StartedRun:
    """A run that is going on, and its folder as the machine sees it."""

    cluster: NamespaceCluster
    name: str
    process: subprocess.Popen[bytes]

    @property
    def folder(self) -> Path:
        """The run folder; of a run on an object store, its local folder."""
        shared = self.cluster.folder / "shared"
        return next(shared.glob(f"results/{self.name}-*"), shared / self.name)

    def events(self) -> list[Event]:
        return read_events(self.folder / "events.jsonl")

    def steps(self) -> int:
        return len(by_step(self.events()))

    def wait_for_step(self, step: int) -> None:
        log = self.cluster.output_path(self.name)
        wait_until(lambda: self.steps() >= step or self.process.poll() is not None, f"step {step}", log, 600)
        assert self.process.poll() is None, log.read_text(encoding="utf-8")

    def worker(self, rank: int) -> tuple[Node, int]:
        """Return the node of a worker, and the machine's id of its process."""
        log = os.stat(self.folder / "logs" / f"worker_{rank}.log")
        for node in self.cluster.nodes:
            for pid in node.processes():
                if _writes_to(pid, log):
                    return node, pid
        raise LookupError(f"no node has worker {rank}")


def _writes_to(pid: int, file: os.stat_result) -> bool:
    """Return whether the standard output of a process is this file."""
    try:
        output = os.stat(f"/proc/{pid}/fd/1")
    except OSError:
        return False
    return (output.st_dev, output.st_ino) == (file.st_dev, file.st_ino)


# Disturbances


def leave_alone(run: StartedRun) -> None:
    """The undisturbed run."""


def cut_link(run: StartedRun) -> None:
    """Cut the link of the last node for a while."""
    run.wait_for_step(_DISTURBED_STEP)
    node = run.cluster.nodes[-1]
    run.cluster.cut_link(node)
    time.sleep(CUT_SECONDS)
    run.cluster.restore_link(node)


def disturb_clock(run: StartedRun) -> None:
    """Set the clock of the main worker's node ahead, and kill a worker: the driver compares times."""
    run.wait_for_step(_DISTURBED_STEP)
    node, _ = run.worker(0)
    run.cluster.shift_clock(node, _CLOCK_SECONDS)
    run.wait_for_step(_DISTURBED_STEP + 4)
    os.kill(run.worker(1)[1], signal.SIGKILL)
    run.wait_for_step(STEPS // 2)
    run.cluster.shift_clock(node, -_CLOCK_SECONDS)


def load_core(run: StartedRun) -> None:
    """Let busy processes take the core that a worker is pinned to."""
    run.wait_for_step(_DISTURBED_STEP)
    node, pid = run.worker(1)
    core = min(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
    spin = ["taskset", "--cpu-list", str(core), "timeout", "20", sys.executable, "-c", "while True: pass"]
    for _ in range(3):
        node.start(spin, os.environ, run.cluster.folder / "busy.log", run.cluster.folder)


def lose_node(run: StartedRun) -> None:
    """End the last node with all of its processes, for good."""
    run.wait_for_step(_DISTURBED_STEP)
    run.cluster.lose_node(run.cluster.nodes[-1])


# Checks


def survives_without_failure(run: StartedRun) -> list[str]:
    failures = [event["message"] for event in of_kind(run.events(), "failure")]
    return [f"no failure was expected: {failures}"] if failures else []


def recovers(run: StartedRun) -> list[str]:
    """There was a failure and a recovery, with times that are possible."""
    events = run.events()
    problems = [f"no {kind} event" for kind in ("failure", "recovery") if not of_kind(events, kind)]
    for event in of_kind(events, "recovery"):
        times = {name: value for name, value in event.items() if name.endswith("_seconds")}
        if any(not 0 <= value < _LONGEST_RECOVERY_SECONDS for value in times.values()):
            problems.append(f"impossible times of a recovery: {times}")
    return problems


def is_uploaded(run: StartedRun) -> list[str]:
    """There was no failure, and another node evaluates the run that the object store holds."""
    command = [sys.executable, "-m", "orchestrator", "evaluate", _address(run.name)]
    code = run.cluster.call(run.cluster.nodes[-1], command, run.cluster.folder)
    problems = [f"'orchestrator evaluate' on another node ended with code {code}"] if code else []
    return survives_without_failure(run) + problems


@dataclass(frozen=True)
class Case:
    """A disturbance of a run, and the expected effect."""

    name: str
    strategy: str
    disturbance: str
    expected: str
    disturb: Callable[[StartedRun], None]
    check: Callable[[StartedRun], list[str]]
    flags: tuple[str, ...] = ()
    loses_node: bool = False
    on_object_store: bool = False

    @property
    def run_dir(self) -> str:
        return _address(self.name) if self.on_object_store else self.name


def _address(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def _cases(strategy: str) -> list[Case]:
    prefix = "ep" if strategy == "expert parallel" else "dp"
    cut = f"the link of one node cut for {CUT_SECONDS} s"
    return [
        Case(
            f"{prefix}-cut-waited",
            strategy,
            f"{cut}, `--collective-timeout 60`",
            "the workers wait; no failure",
            cut_link,
            survives_without_failure,
            ("--collective-timeout", "60"),
        ),
        Case(
            f"{prefix}-cut",
            strategy,
            f"{cut}, `--collective-timeout 5`",
            "the unreachable worker is replaced, or the others continue",
            cut_link,
            recovers,
            ("--collective-timeout", "5"),
        ),
        Case(
            f"{prefix}-clock",
            strategy,
            "the clock of the main worker's node an hour ahead, then an hour behind; another worker killed",
            "the worker is replaced; the recorded times are right",
            disturb_clock,
            recovers,
        ),
        Case(
            f"{prefix}-load",
            strategy,
            "three busy processes on the core of one worker, for 20 s",
            "the others wait; no failure",
            load_core,
            survives_without_failure,
        ),
        Case(
            f"{prefix}-lost",
            strategy,
            "one node lost for good",
            "the others continue with the same global batch",
            lose_node,
            recovers,
            loses_node=True,
        ),
        Case(
            f"{prefix}-object-store",
            strategy,
            "none; run folder on an object store",
            "no failure; another node evaluates what is stored",
            leave_alone,
            is_uploaded,
            on_object_store=True,
        ),
    ]


CASES = [case for strategy in STRATEGIES for case in _cases(strategy)]


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, compared with the undisturbed one."""

    case: Case
    losses: list[float]
    events: list[Event]
    summary: Mapping[str, Any]
    problems: list[str]
    largest_difference: float = 0.0

    @property
    def seen(self) -> str:
        """The failures and recoveries, as text."""
        summary = self.summary
        failures = summary["failures"]
        counts = f"{failures} failure{'s' * (failures != 1)}, {summary['lost_steps']} steps repeated"
        reasons = [event["reason"].split(";")[-1].strip() for event in of_kind(self.events, "recovery")]
        return "; ".join([counts, f"{summary['workers']} workers at the end", *reasons])


def failed(case: Case, error: BaseException) -> Outcome:
    """Return the outcome of a case that did not come to its end."""
    summary = {"failures": 0, "lost_steps": 0, "workers": 0}
    return Outcome(case, [], [], summary, [str(error)[-1000:]])


def undisturbed(strategy: str) -> Case:
    prefix = "ep" if strategy == "expert parallel" else "dp"
    return Case(f"{prefix}-calm", strategy, "none", "no failure", leave_alone, survives_without_failure)


def run_case(cluster: NamespaceCluster, case: Case, calm: Outcome | None = None) -> Outcome:
    """Run a case to its end; afterwards the cluster has as many nodes as before."""
    if case.on_object_store:
        cluster.start_object_server()
    arguments = [*SETTINGS, *STRATEGIES[case.strategy], *case.flags]
    run = StartedRun(cluster, case.name, cluster.start_run(case.run_dir, *arguments))
    try:
        case.disturb(run)
        output = cluster.finish_run(run.process, case.run_dir, timeout_s=900)
    finally:
        end(run.process)
        if case.loses_node:
            cluster.add_node()
    events = run.events()
    losses = [event["loss"] for event in by_step(events)]
    problems = case.check(run)
    if "[c10d]" in output:
        problems.append("torch's own warnings are on the screen")
    if len(losses) != STEPS:
        problems.append(f"{len(losses)} steps of {STEPS} are recorded")
    summary = read_summary(run.folder)
    if summary["seconds"] >= _CLOCK_SECONDS:
        problems.append(f"the summary says that the run took {summary['seconds']:.0f} s")
    if calm is None:
        return Outcome(case, losses, events, summary, problems)
    pairs = zip(losses, calm.losses, strict=False)
    largest = max(abs(loss - other) / abs(other) for loss, other in pairs)
    if largest > TOLERANCE:
        problems.append(f"losses differ by {largest:.1e}, more than {TOLERANCE:.0e}")
    return Outcome(case, losses, events, summary, problems, largest)
