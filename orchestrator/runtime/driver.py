"""The driver of a run on several workers: it starts them, shows their events, and restarts them.

No Ray call is made inside a step. Workers talk to each other through torch.distributed, and to
people through the run folder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, Self

import ray
from ray import cloudpickle

from orchestrator.config.settings import Config
from orchestrator.config.writer import to_json
from orchestrator.errors import TrainingFailed, UserError
from orchestrator.live.callbacks.callbacks import CallbackRunner, callbacks_of_model
from orchestrator.live.screen.screen import Screen
from orchestrator.live.trackers.trackers import TrackerThread
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.plan.workers import uses_gpus
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Checkpoint, End, Epoch, Evaluation, Event, Resume, Start, Step
from orchestrator.record.files.event_log import DriverLog, EventLog, Listener
from orchestrator.record.files.log_copy import copy_masked
from orchestrator.record.files.reading import extent_of, last_recorded_step
from orchestrator.record.files.tail import Follower
from orchestrator.record.summary.index import FoldKeeper
from orchestrator.redaction import Secrets, mask_tree
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.run.run_dir import how_to_resume
from orchestrator.runtime.bootstrap import NONCE_FILE, REQUESTS_FILE, Assignment, DriverRequests
from orchestrator.runtime.cluster.session import wait_for_slots
from orchestrator.runtime.cluster.survey import resources_now
from orchestrator.runtime.failures import final_error
from orchestrator.runtime.folder_server import DriverEnd
from orchestrator.runtime.ray_internals import (
    logs_folder,
    placement_groups_of_job,
    remove_placement_group_by_id,
)
from orchestrator.runtime.recovery import Failure, FailureHistory, GiveUp, Restart, decide_restart
from orchestrator.runtime.recovery_log import FailureTimes, RecoveryLog
from orchestrator.runtime.shared_folder import nodes_see_start, open_link
from orchestrator.tasks.load import loads_by_name
from orchestrator.train.remote.node_folder import node_folder
from orchestrator.train.remote.remote_start import remote_start
from orchestrator.train.remote.run import RemoteRun, mirroring
from orchestrator.train.worker.observers import stop_on_signal
from orchestrator.train.worker.resume import ResumeFrom
from orchestrator.train.worker.run import count_starts, record_failure
from orchestrator.types import first_line

_POLL_SECONDS = 0.1
_MAX_LOG_BYTES = 2**22
_CLOCK_TOLERANCE_SECONDS = 2.0
"""How far the time of a new event may be from the driver's: events are read ten times a second."""
_SIGNS_OF_LIFE = (Start, Step, Evaluation, Epoch, Checkpoint)
"""Events that only workers write."""
_NODE_RETURN_SECONDS = 5.0
"""How long a lost node may take to come back before the run goes on without it."""


@dataclass(frozen=True)
class AttemptResult:
    """How a group of workers ended: with a status, or with a failure."""

    status: str | None = None
    failure: Failure | None = None
    error: BaseException | None = None
    """The error to show to the user, if the failure is final."""
    given_up: GiveUp | None = None
    """Set if the attempt itself has decided that the failure is final."""


class Attempt(Protocol):
    """One group of workers, from its start to its end."""

    def wait(self, timeout_s: float) -> AttemptResult | None:
        """Return the result; None if the attempt goes on after the timeout."""
        ...

    def close(self) -> None:
        """Release what is left of the workers."""
        ...


StartAttempt = Callable[[Assignment, int, bool, EventLog, RecoveryLog], Attempt]
"""Starts a number of workers, with a GPU each or without. The driver's own events go to the logs."""


@dataclass(frozen=True)
class Observers:
    """The observers of a run beside its workers: screen, the user's callbacks, metrics, and uploads."""

    screen: Screen
    callbacks: CallbackRunner = field(default_factory=lambda: CallbackRunner([]))
    remote: RemoteRun | None = None
    """The remote folder that the run folder is copied to, if there is one."""
    listeners: Sequence[Listener] = ()
    """Further readers of the events."""


def drive(
    start: StartAttempt, prepared: PreparedRun, cluster: Cluster, run_dir: Path, observers: Observers
) -> str:
    """Run to the end, through failures. Return the status of the run."""
    screen = observers.screen
    callbacks = observers.callbacks
    begun = perf_counter()
    starts_before = count_starts(run_dir)
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    (logs / REQUESTS_FILE).unlink(missing_ok=True)
    (logs / NONCE_FILE).write_text(uuid.uuid4().hex, encoding="utf-8")
    config = prepared.resolved.config
    settings = mask_tree(to_json(config), secret_values())
    with ExitStack() as stack:
        # The stack closes screen and trackers even if the record cannot be written to its end.
        stack.callback(screen.close)
        trackers = TrackerThread(
            config.watch.trackers, run_dir, run_dir.name, settings, on_warning=screen.note
        )
        stack.callback(trackers.close)
        try:
            with (
                _RunRecord(run_dir, [screen, trackers, callbacks, *observers.listeners]) as record,
                stop_on_signal() as stop_requested,
                mirroring(observers.remote, record.log, config.checkpoint.keep),
            ):
                callbacks.bind(run_dir, config, record.log.write)
                requests = _Requests(run_dir / "logs", stop_requested, callbacks, screen.note)
                driver = _Driver(
                    start, prepared, cluster, run_dir, record, requests, screen.note, observers.remote
                )
                status = driver.run()
            # The record has handed over its last events: ``on_end`` was called.
            callbacks.check()
            return status
        except BaseException as error:
            record_failure(run_dir, error, perf_counter() - begun, starts_before, None, callbacks)
            raise


class _RunRecord:
    """The event log of a run: the driver writes its own file, and follows that of the workers."""

    def __init__(self, run_dir: Path, readers: Sequence[Listener]) -> None:
        self._path = run_dir / "events.jsonl"
        self._restarted = False
        self._last_sign_of_life: float | None = None
        """When the workers last wrote an event, by the driver's clock."""
        self._last_step: int | None = None
        self.has_end = False
        """Whether the workers have recorded the end of the run."""
        # Readers look for this file, also in a run whose workers never started.
        self._path.touch()
        self._follower = Follower(
            self._path,
            [*readers, self._observe, FoldKeeper(self._path)],
            extent_of(self._path),
        )
        self.log = DriverLog(self._path, secrets=secret_values())
        self.recovery_log = RecoveryLog(self.log, run_dir)

    def poll(self) -> None:
        """Hand new events to the readers."""
        self._follower.poll()

    @property
    def last_step(self) -> int:
        """The last step that the workers have recorded."""
        return last_recorded_step(self._path)

    def add_restart(self, failure: Failure, decision: Restart, workers: int, detected_at: float) -> None:
        """Record a failure of ``workers`` workers, which are restarted now."""
        failed_at = detected_at if self._last_sign_of_life is None else self._last_sign_of_life
        times = FailureTimes(failed_at, detected_at)
        self.recovery_log.failed(failure, decision.reason, workers, 0, times)
        self._restarted = True
        self.poll()

    def _observe(self, event: Event) -> None:
        match event:
            case Step():
                self._last_step = event.step
            case Resume():
                self._warn_of_missing_steps(event)
                self.recovery_log.resumed(event.source or "disk")
            case End():
                self.has_end = True
            case _:
                pass
        written_at = _driver_time(event.time)
        if isinstance(event, _SIGNS_OF_LIFE):
            self._last_sign_of_life = written_at
        # Hosts recover without a restart, and ``ExpertParallelRun`` measures that itself.
        if self._restarted:
            self.recovery_log.observe(event, written_at)

    def _warn_of_missing_steps(self, resume: Resume) -> None:
        """Warn of steps that a run does not repeat, and whose events were lost with their host.

        Where a link brings the events, a snapshot may arrive before the events of its steps."""
        last_step = self._last_step
        if resume.source == "memory" and last_step is not None and (resume.step or 0) > last_step:
            message = (
                f"the events of steps {last_step + 1} to {resume.step} are missing: they had not reached "
                "the driver when their host was lost"
            )
            self.log.write(kinds.Warned(kind="record", message=message))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # An error of closing, from a full disk for one, must not hide the error of the run.
        with suppress(OSError) if error_type is not None else nullcontext():
            self._close()

    def _close(self) -> None:
        try:
            self._follower.poll()
            self.recovery_log.close(time.time())
            self.log.close()
        finally:
            self._follower.close()


def _driver_time(written_at: float | None) -> float:
    """Return the time of an event that was read just now, by the driver's clock.

    The clock of the worker's node may be wrong: if it is, the time of reading counts."""
    now = time.time()
    return written_at if written_at is not None and abs(now - written_at) < _CLOCK_TOLERANCE_SECONDS else now


@dataclass
class _Requests:
    """Passes the requests of the user and of callbacks on to the workers."""

    logs: Path
    stop_requested: Callable[[], bool]
    callbacks: CallbackRunner
    note: Callable[[str], None]
    _written: DriverRequests = field(default_factory=DriverRequests)

    def pass_on(self) -> None:
        """Write the requests if they are new. Raise the error of a callback if that is to end the run."""
        self.callbacks.check()
        asked = DriverRequests(self.stop_requested(), self.callbacks.stop_reason, self.callbacks.num_saves)
        if asked == self._written:
            return
        if asked.interrupt and not self._written.interrupt:
            self.note("stopping after this step, with a checkpoint ...")
        asked.write(self.logs)
        self._written = asked


@dataclass
class _Driver:
    start: StartAttempt
    prepared: PreparedRun
    cluster: Cluster
    run_dir: Path
    record: _RunRecord
    requests: _Requests
    note: Callable[[str], None]
    remote: RemoteRun | None = None
    _link: DriverEnd | None = None
    """The link to the run folder, for workers that do not see it."""

    def run(self) -> str:
        """Start one attempt after the other, until one succeeds or the driver gives up."""
        parallel = self.prepared.resolved.config.parallel
        workers = self.prepared.plan.workers.value
        gpu = uses_gpus(self.prepared.resolved.config, self.cluster)
        if self.cluster.autoscaling:
            wait_for_slots(workers, gpu, parallel.resource_timeout, self.note)
        if self.remote is not None:
            self._link = open_link(self.run_dir, self.remote.folder, gpu)
        if self._link is not None:
            self.note("the nodes share no disk: each worker uploads its own part of a checkpoint")
        start = remote_start(self.prepared.resolved.config)
        if start is not None and not nodes_see_start(start, gpu):
            self.note(f"nodes download the checkpoint {start.checkpoint.name} of {start.url}")
        self.note(f"starting {workers} worker{'s' if workers > 1 else ''} ...")
        history = FailureHistory()
        resume = None
        while True:
            result = self._attempt(workers, gpu, resume)
            if result.status is not None:
                self._check_end()
                return result.status
            failure = result.failure
            assert failure is not None
            if result.given_up is not None:
                raise self._final_error(failure, result.error, result.given_up)
            detected_at = time.time()  # before the wait for devices, which is part of the regrouping
            history = history.with_failure(failure, self.record.last_step)
            # An error of the run itself is final: no need to wait for devices.
            slots = _available_slots(workers, gpu) if failure.kind != "error" else workers
            decision = decide_restart(
                failure, history, max_failures=parallel.max_failures, workers=workers, slots=slots
            )
            if isinstance(decision, GiveUp):
                raise self._final_error(failure, result.error, decision)
            self.record.add_restart(failure, decision, workers, detected_at)
            resume = ResumeFrom(halvings=decision.halvings)
            workers = decision.workers

    def _check_end(self) -> None:
        """Raise ``TrainingFailed`` if a link has not brought the last events of the run."""
        if self._link is not None and not self.record.has_end:
            resuming = how_to_resume(self.prepared.resolved.config, self._link.url)
            folder = node_folder((self.run_dir / "logs" / NONCE_FILE).read_text(encoding="utf-8")).name
            raise TrainingFailed(
                "the run ended, but its last events have not reached the driver; they are on the node of "
                f"worker 0, in {folder} of its TMPDIR. Repeat the steps since the last "
                f"checkpoint with: {resuming}"
            )

    def _final_error(self, failure: Failure, error: BaseException | None, decision: GiveUp) -> BaseException:
        if decision.can_resume:
            resuming = how_to_resume(self.prepared.resolved.config, self.run_dir)
            decision = GiveUp(f"{decision.reason}; continue from the newest checkpoint with: {resuming}")
        return final_error(failure, error, decision)

    @cached_property
    def _callbacks_sent(self) -> tuple[str | bytes, ...]:
        """The callbacks for workers, pickled once: their hooks may open files before a later attempt."""
        return _sent_callbacks(self.prepared.resolved.config, self.requests.callbacks)

    def _attempt(self, workers: int, gpu: bool, resume: ResumeFrom | None) -> AttemptResult:
        """Run one group of workers from its start to its end."""
        groups_before = placement_groups()
        assignment = replace(
            make_assignment(self.prepared, self.run_dir, resume),
            link=self._link,
            callbacks=self._callbacks_sent,
        )
        attempt = self.start(assignment, workers, gpu, self.record.log, self.record.recovery_log)
        succeeded = False
        try:
            while True:
                result = attempt.wait(_POLL_SECONDS)
                self.record.poll()
                if result is not None:
                    succeeded = result.status is not None
                    return result
                self.requests.pass_on()
        finally:
            attempt.close()
            self.record.poll()
            if not succeeded:
                remove_groups_since(groups_before)
            _copy_logs(self.run_dir / "logs", secret_values())


def make_assignment(prepared: PreparedRun, run_dir: Path, resume: ResumeFrom | None = None) -> Assignment:
    """Return the data that workers get. Tasks are sent only if they cannot be loaded by their name."""
    config = prepared.resolved.config
    if loads_by_name(config.task):
        prepared = replace(prepared, task=None)  # pyrefly: ignore[bad-argument-type]
    nonce = (run_dir / "logs" / NONCE_FILE).read_text(encoding="utf-8")
    start = remote_start(config)
    return Assignment(prepared.with_secrets(), run_dir, Path.cwd(), nonce, resume, start=start)


def _sent_callbacks(config: Config, callbacks: CallbackRunner) -> tuple[str | bytes, ...]:
    """Return the callbacks that look at the model as the main worker gets them: names or pickled objects."""
    sources = callbacks_of_model(config, callbacks.callbacks)
    return tuple(source if isinstance(source, str) else _pickled(source) for source in sources)


def _pickled(callback: Any) -> bytes:
    try:
        return cloudpickle.dumps(callback)
    except Exception as error:
        name = type(callback).__name__
        raise UserError(
            f"the callback {name} has on_model, which the main worker calls on a copy; it cannot be copied: "
            f"{first_line(error)}. Open files and connections in on_model itself, or give the callback by "
            f"its name (callbacks='package.module:{name}')"
        ) from None


def _available_slots(workers: int, gpu: bool) -> int:
    """Return the number of available devices. A node that is coming back gets a few seconds."""
    kind = "GPU" if gpu else "CPU"
    deadline = perf_counter() + _NODE_RETURN_SECONDS
    available = resources_now()[kind]
    while available < workers and perf_counter() < deadline:
        time.sleep(0.25)
        available = resources_now()[kind]
    return available


def placement_groups() -> set[bytes]:
    """Return the placement groups of this job that hold resources."""
    return placement_groups_of_job(ray.get_runtime_context().get_job_id())


def remove_groups_since(before: set[bytes]) -> None:
    """Remove the placement groups that are new.

    Ray Train leaves that of workers that failed to start; the next group would wait for its devices."""
    for group_id in placement_groups() - before:
        with suppress(Exception):
            remove_placement_group_by_id(group_id)


def _copy_logs(logs: Path, secrets: Secrets) -> None:
    """Copy the logs of Ray's processes on this node to the run, and mask secrets in all logs.

    Workers mask what Python prints; the output of libraries and child processes is masked here."""
    for path in logs.glob("worker_*.log"):
        with suppress(OSError):
            copy_masked(path, path, secrets)
    folder = logs / "ray"
    with suppress(Exception):
        job_id = ray.get_runtime_context().get_job_id()
        for path in (logs_folder() or Path()).glob(f"worker-*-{job_id}-*"):
            if 0 < path.stat().st_size <= _MAX_LOG_BYTES:
                folder.mkdir(parents=True, exist_ok=True)
                copy_masked(path, folder / path.name, secrets)
