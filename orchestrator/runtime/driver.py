"""The driver's side of a run on several workers: it starts them, shows what they record, and begins again after a failure that
can be mended. No Ray call is made inside a step; workers talk over torch.distributed, and to people through the run folder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import ray
from torch import nn

from orchestrator.config.reader import to_json
from orchestrator.errors import OrchestratorError, OutOfMemory, ResourceError, TaskFailed, TrainingFailed
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.plan.workers import on_gpus
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.record.log_copy import copy_masked
from orchestrator.record.screen import Screen
from orchestrator.record.tail import Follower, whole_lines
from orchestrator.record.trackers import TrackerThread
from orchestrator.redaction import Secrets, mask, masked
from orchestrator.runtime.bootstrap import NONCE, STOP, Assignment
from orchestrator.runtime.cluster.session import first_line, wait_for
from orchestrator.runtime.cluster.survey import resources_now
from orchestrator.runtime.ray_internals import (
    logs_folder,
    placement_groups_of_job,
    remove_placement_group_by_id,
)
from orchestrator.runtime.recovery import Again, Failure, GiveUp, decide
from orchestrator.tasks.load import BUILT_IN
from orchestrator.tasks.validate import build_checked_model
from orchestrator.train.checkpoint.restore import restore_model
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.worker.observers import stop_on_signal
from orchestrator.train.worker.resume import PastFailure, ResumeFrom
from orchestrator.train.worker.run import record_failure
from orchestrator.train.worker.run_dir import Prepared

_POLL_SECONDS = 0.1
_LOG_BYTES = 2**22
_RETURN_SECONDS = 5.0  # that a lost node has to come back before the run goes on without it


@dataclass(frozen=True)
class Ended:
    """How a group of workers ended: with a status, or with a failure and the error that the user is told if it is the last."""

    status: str | None = None
    failure: Failure | None = None
    error: BaseException | None = None
    given_up: GiveUp | None = None
    """Why nothing more can be done, where that is decided already."""


class Attempt(Protocol):
    """One group of workers, from its start to its end."""

    def wait(self, seconds: float) -> Ended | None:
        """How it ended; None while it goes on."""
        ...

    def close(self) -> None:
        """Let go of whatever is left of it."""
        ...


Start = Callable[[Assignment, int, bool, EventLog], Attempt]
"""Start so many workers, each with a GPU or without. What the driver has to say of them goes into the log."""


def drive(start: Start, prepared: Prepared, cluster: Cluster, run_dir: Path, screen: Screen) -> str:
    """Run to the end, through failures. Returns the status of the run."""
    begun = perf_counter()
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    (logs / STOP).unlink(missing_ok=True)
    (logs / NONCE).write_text(uuid.uuid4().hex, encoding="utf-8")
    config = prepared.resolved.config
    shown = masked(to_json(config), secret_values())
    trackers = TrackerThread(config.watch.trackers, run_dir, run_dir.name, shown, on_warning=screen.note)
    events = run_dir / "events.jsonl"
    follower = Follower(events, [screen, trackers], whole_lines(events))
    try:
        with interruptible() as asked:
            return _Driver(start, prepared, cluster, run_dir, follower, asked, screen.note).run()
    except BaseException as error:
        follower.close()
        record_failure(run_dir, error, perf_counter() - begun)
        raise
    finally:
        follower.close()
        trackers.close()
        screen.close()


@dataclass
class _Driver:
    start: Start
    prepared: Prepared
    cluster: Cluster
    run_dir: Path
    follower: Follower
    asked: Callable[[], bool]
    note: Callable[[str], None]

    def run(self) -> str:
        """Attempts, until one ends well or nothing more can be done."""
        workers, failures, halvings = self.prepared.plan.workers.value, 0, 0
        gpu = on_gpus(self.prepared.resolved.config, self.cluster)
        if self.cluster.autoscaling:
            wait_for(workers, gpu, self.prepared.resolved.config.parallel.resource_timeout, self.note)
        resume = None
        self.note(f"starting {workers} worker{'s' * (workers > 1)} ...")
        while True:
            ended = self._attempt(workers, gpu, resume)
            if ended.status is not None:
                return ended.status
            assert ended.failure is not None
            if ended.given_up is not None:
                raise final(ended.failure, ended.error, ended.given_up)
            failure, failures, detected = ended.failure, failures + 1, time.time()
            most = self.prepared.resolved.config.parallel.max_failures
            slots = _slots(workers, gpu) if failure.kind != "error" else workers
            choice = decide(
                failure, failures=failures, max_failures=most, workers=workers, slots=slots, halvings=halvings
            )
            if isinstance(choice, GiveUp):
                raise final(failure, ended.error, choice)
            resume = self._resume_from(choice, failure, failures, detected, workers)
            workers, halvings = choice.workers, choice.halvings

    def _attempt(self, workers: int, gpu: bool, resume: ResumeFrom | None) -> Ended:
        """One group of workers, from its start to its end."""
        before, stop = _groups(), self.run_dir / "logs" / STOP
        log = EventLog(self.run_dir / "events.jsonl", secrets=secret_values())
        attempt = self.start(_assignment(self.prepared, self.run_dir, resume), workers, gpu, log)
        well = False
        try:
            while True:
                ended = attempt.wait(_POLL_SECONDS)
                self.follower.poll()
                if ended is not None:
                    well = ended.status is not None
                    return ended
                if self.asked() and not stop.exists():
                    self.note("stopping after the step at hand, with a checkpoint ...")
                    stop.touch()
        finally:
            attempt.close()
            log.close()
            self.follower.poll()
            if not well:
                _remove(_groups() - before)
            _keep_logs(self.run_dir / "logs", secret_values())

    def _resume_from(
        self, choice: Again, failure: Failure, attempt: int, detected: float, workers: int
    ) -> ResumeFrom:
        events = read_events(self.run_dir / "events.jsonl")
        steps = of_kind(events, "step")
        last = steps[-1]["step"] if steps else 0
        log = EventLog(self.run_dir / "events.jsonl", secrets=secret_values())
        log.write(
            "failure", kind=failure.kind, message=choice.reason, rank=failure.rank, step=last, final=False
        )
        log.close()
        self.follower.poll()
        alive = events[-1]["time"] if events else detected  # the last sign of life
        reason = mask(choice.reason, secret_values())
        past = PastFailure(attempt, reason, alive, detected, workers, last)
        return ResumeFrom(halvings=choice.halvings, failure=past)


def _assignment(prepared: Prepared, run_dir: Path, resume: ResumeFrom | None) -> Assignment:
    config = prepared.resolved.config
    named = config.task in BUILT_IN or (":" in config.task and not config.task.startswith("python:"))
    sent = replace(prepared, task=None) if named else prepared  # pyright: ignore[reportArgumentType] -- loaded by name over there
    return Assignment(
        sent.with_secrets(),
        run_dir,
        Path.cwd(),
        (run_dir / "logs" / NONCE).read_text(encoding="utf-8"),
        resume,
    )


def failure_of_worker(rank: int, error: BaseException, lost: bool = False, mended: bool = False) -> Failure:
    """What one worker failed of; ``lost`` if it is its process that is gone. What a user's code raises is its own doing, unless it
    can be ``mended``: it may have been the moment."""
    if lost:
        return Failure("worker", f"worker {rank} was lost", rank)
    if isinstance(error, OutOfMemory):
        return Failure("memory", str(error), rank, error.micro_batch)
    if is_communication_error(error):
        # who waits in vain is not the one to blame: no rank is named
        return Failure(
            "communication",
            "workers lost touch with each other: one is frozen, gone or out of reach (see logs/)",
        )
    told = (
        str(error)
        if isinstance(error, OrchestratorError)
        else f"worker {rank}: {type(error).__name__}: {first_line(error)}"
    )
    known = isinstance(error, OrchestratorError) and not (mended and isinstance(error, TaskFailed))
    return Failure("error" if known else "fault", told, rank)


def told_error(cause: BaseException, traceback: object, failure: Failure) -> BaseException:
    """What the user is told of a worker's error: their own as it was raised, a bug of ours with its traceback."""
    return (
        cause if isinstance(cause, OrchestratorError) else TrainingFailed(f"{failure.message}\n{traceback}")
    )


def final(failure: Failure, error: BaseException | None, choice: GiveUp) -> BaseException:
    """What the user is told at the end: the error, or why we gave up."""
    if failure.kind in ("error", "fault") and error is not None:
        return error
    return (ResourceError if failure.kind in ("resources", "memory") else TrainingFailed)(choice.reason)


def _slots(workers: int, gpu: bool) -> int:
    """Devices to be had now; a node that is coming back gets a moment."""
    deadline = perf_counter() + _RETURN_SECONDS
    while (there := resources_now()["GPU" if gpu else "CPU"]) < workers and perf_counter() < deadline:
        time.sleep(0.25)
    return there


def _groups() -> set[bytes]:
    """Placement groups of this job, and of no other, that hold resources."""
    return placement_groups_of_job(ray.get_runtime_context().get_job_id())


def _remove(groups: set[bytes]) -> None:
    """Ray Train leaves the placement group of a group of workers that failed to start; the next one would wait for it."""
    for name in groups:
        with suppress(Exception):
            remove_placement_group_by_id(name)


def _keep_logs(logs: Path, secrets: Secrets) -> None:
    """What Ray's own processes on this node said of this job, beside what the workers said: all of it without secrets. Workers mask
    what Python writes; what a library or a program of theirs wrote past it is masked here."""
    for path in logs.glob("worker_*.log"):
        with suppress(OSError):
            copy_masked(path, path, secrets)
    folder = logs / "ray"
    with suppress(Exception):
        job = ray.get_runtime_context().get_job_id()
        for path in (logs_folder() or Path()).glob(f"worker-*-{job}-*"):
            if 0 < path.stat().st_size <= _LOG_BYTES:
                folder.mkdir(parents=True, exist_ok=True)
                copy_masked(path, folder / path.name, secrets)


def trained_model(prepared: Prepared, run_dir: Path) -> nn.Module:
    """The model as the workers left it, from the last checkpoint."""
    model = build_checked_model(prepared.task)
    found, _ = CheckpointStore(run_dir / "checkpoints", mend=False).newest_good()
    resume = prepared.resolved.config.checkpoint.resume
    if found is None and resume not in (None, "auto"):  # another run's, with nothing left to do
        found, _ = resumable(str(resume), CheckpointStore(run_dir / "checkpoints", mend=False))
    if found is None:
        raise TrainingFailed(f"no good checkpoint in {run_dir / 'checkpoints'}")
    restore_model(found[1], model)
    return model
