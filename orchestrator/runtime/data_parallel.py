"""Data parallel on Ray Train: the driver's side. It starts the workers, shows what they record, and begins again after a
failure that can be mended. No Ray call is made inside a step; workers talk over torch.distributed, and to people through
the run folder."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import ray
from ray._private.state import state
from ray._private.worker import global_worker
from ray._raylet import PlacementGroupID
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup
from torch import nn

from orchestrator.config.reader import to_json
from orchestrator.errors import OrchestratorError, OutOfMemory, ResourceError, TrainingFailed
from orchestrator.plan.cluster import Cluster
from orchestrator.plan.parallel import on_gpus
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.record.follow import Follower, whole_lines
from orchestrator.record.screen import Screen
from orchestrator.record.trackers import TrackerThread
from orchestrator.runtime.recovery import Again, Failure, GiveUp, decide
from orchestrator.runtime.session import first_line, wait_for
from orchestrator.runtime.survey import resources_now
from orchestrator.runtime.worker import NONCE, STOP, Assignment, Meeting, worker
from orchestrator.tasks.load import BUILT_IN
from orchestrator.train.assemble import resumable
from orchestrator.train.checkpoint import CheckpointStore
from orchestrator.train.folder import Prepared
from orchestrator.train.run import Restart, record_failure
from orchestrator.train.state import restore_model
from orchestrator.train.step import built
from orchestrator.train.watching import interruptible
from orchestrator.train.world import is_communication_error

_POLL_SECONDS = 0.1
_NEEDLESS = ("PlacementGroupCleanerCallback", "DatasetsCallback")
_LOG_BYTES = 2**22
_RETURN_SECONDS = 5.0  # that a lost node has to come back before the run goes on without it


def train(prepared: Prepared, cluster: Cluster, run_dir: Path, screen: Screen) -> str:
    """Run to the end, through failures. Returns the status of the run."""
    begun = perf_counter()
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    (logs / STOP).unlink(missing_ok=True)
    (logs / NONCE).write_text(uuid.uuid4().hex, encoding="utf-8")
    config = prepared.resolved.config
    trackers = TrackerThread(config.watch.trackers, run_dir, run_dir.name, to_json(config), on_warning=screen.note)
    events = run_dir / "events.jsonl"
    follower = Follower(events, [screen, trackers], whole_lines(events))
    try:
        with interruptible() as asked:
            return _Driver(prepared, cluster, run_dir, follower, asked, screen.note).run()
    except BaseException as error:
        follower.close()
        record_failure(run_dir, error, perf_counter() - begun)
        raise
    finally:
        follower.close()
        trackers.close()
        screen.close()


class Lean(TorchTrainer):
    """Ray Train's trainer without the actors that only Tune and Ray Data need."""

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in _NEEDLESS]


@dataclass
class _Driver:
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
        restart = None
        while True:
            outcome = self._attempt(workers, gpu, restart)
            if isinstance(outcome, str):
                return outcome
            failure, error = outcome
            failures, detected = failures + 1, time.time()
            most = self.prepared.resolved.config.parallel.max_failures
            slots = _slots(workers, gpu) if failure.kind != "error" else workers
            choice = decide(failure, failures=failures, max_failures=most, workers=workers, slots=slots, halvings=halvings)
            if isinstance(choice, GiveUp):
                raise _final(failure, error, choice)
            restart = self._restart(choice, failure, failures, detected, workers)
            workers, halvings = choice.workers, choice.halvings

    def _attempt(self, workers: int, gpu: bool, restart: Restart | None) -> str | tuple[Failure, BaseException]:
        """One group of workers, from its start to its end."""
        before = _groups()
        attempt = _Fit(_trainer(self.prepared, self.run_dir, workers, gpu, restart))
        stop = self.run_dir / "logs" / STOP
        try:
            while not attempt.wait(_POLL_SECONDS):
                self.follower.poll()
                if self.asked() and not stop.exists():
                    stop.touch()
        finally:
            self.follower.poll()
            if attempt.error is not None or not attempt.done:
                _remove(_groups() - before)
            _keep_logs(self.run_dir / "logs" / "ray")
        return str(attempt.value["status"]) if attempt.error is None else (failure_of(attempt.error), attempt.error)

    def _restart(self, choice: Again, failure: Failure, attempt: int, detected: float, workers: int) -> Restart:
        events = read_events(self.run_dir / "events.jsonl")
        steps = of_kind(events, "step")
        last = steps[-1]["step"] if steps else 0
        log = EventLog(self.run_dir / "events.jsonl")
        log.write("failure", kind=failure.kind, message=choice.reason, rank=failure.rank, step=last, final=False)
        log.close()
        self.follower.poll()
        alive = events[-1]["time"] if events else detected  # the last sign of life
        return Restart(attempt, choice.reason, alive, detected, workers, last, choice.halvings)


class _Fit:
    """``TorchTrainer.fit`` in a thread of its own, so that this one can watch, and Ray leaves the signals alone."""

    def __init__(self, trainer: Lean) -> None:
        self.error: BaseException | None = None
        self.value: dict[str, Any] = {}
        self.done = False
        self._trainer = trainer
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="ray-train", daemon=True).start()

    def _run(self) -> None:
        try:
            result = self._trainer.fit()
            self.value, self.done = result.return_value or {}, True
        except BaseException as error:  # handed on to the thread that waits
            self.error = error
        finally:
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)


def _trainer(prepared: Prepared, run_dir: Path, workers: int, gpu: bool, restart: Restart | None) -> Lean:
    config = prepared.resolved.config
    named = config.task in BUILT_IN or (":" in config.task and not config.task.startswith("python:"))
    sent = replace(prepared, task=None) if named else prepared  # pyright: ignore[reportArgumentType] -- loaded by name over there
    assignment = Assignment(sent, run_dir, Path.cwd(), (run_dir / "logs" / NONCE).read_text(encoding="utf-8"), restart)
    resources = {"GPU": 1.0, "CPU": 0.0} if gpu else {"CPU": 1.0}
    return Lean(
        worker,
        train_loop_config={"assignment": ray.put(assignment)},
        torch_config=Meeting(prepared.plan.backend.value),  # pyright: ignore[reportArgumentType]
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpu, resources_per_worker=resources, placement_strategy="PACK" if gpu else "SPREAD"
        ),
        run_config=RunConfig(
            name=f"attempt-{uuid.uuid4().hex[:12]}",
            storage_path=str(run_dir / "logs" / "ray_train"),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    )


def failure_of(error: BaseException) -> Failure:
    """What an attempt failed of. Of several workers' errors the cause counts, not what it did to the others."""
    if not isinstance(error, WorkerGroupError):
        kind = "resources" if isinstance(error, TrainingFailedError) else "error"
        return Failure(kind, first_line(getattr(error, "controller_failure", error)))
    found = [_of_worker(rank, _cause(raised)) for rank, raised in sorted(error.worker_failures.items())]
    order = ("error", "memory", "worker", "communication")
    return min(found, key=lambda failure: order.index(failure.kind))


def _cause(raised: BaseException) -> BaseException:
    for name in ("_base_exc", "health_check_failure"):
        raised = getattr(raised, name, raised)
    return raised


def _of_worker(rank: int, error: BaseException) -> Failure:
    if isinstance(error, OutOfMemory):
        return Failure("memory", str(error), rank, error.micro_batch)
    if isinstance(error, RayActorError | WorkerHealthCheckTimeoutError | WorkerHealthCheckFailedError):
        return Failure("worker", f"worker {rank} was lost", rank)
    if is_communication_error(error):
        # who waits in vain is not the one to blame: no rank is named
        return Failure("communication", "workers lost touch with each other: one is frozen, gone or out of reach (see logs/)")
    told = str(error) if isinstance(error, OrchestratorError) else f"worker {rank}: {type(error).__name__}: {first_line(error)}"
    return Failure("error", told, rank)


def _final(failure: Failure, error: BaseException, choice: GiveUp) -> BaseException:
    """What the user is told: their own error as it was raised, a bug of ours with its traceback, or why we gave up."""
    if failure.kind != "error":
        return (ResourceError if failure.kind in ("resources", "memory") else TrainingFailed)(choice.reason)
    if isinstance(error, WorkerGroupError) and failure.rank is not None:
        raised = error.worker_failures[failure.rank]
        own = _cause(raised)
        return own if isinstance(own, OrchestratorError) else TrainingFailed(f"{choice.reason}\n{raised}")
    return error


def _slots(workers: int, gpu: bool) -> int:
    """Devices to be had now; a node that is coming back gets a moment."""
    deadline = perf_counter() + _RETURN_SECONDS
    while (there := resources_now()["GPU" if gpu else "CPU"]) < workers and perf_counter() < deadline:
        time.sleep(0.25)
    return there


def _groups() -> set[bytes]:
    """Placement groups of this job, and of no other, that hold resources."""
    own = bytes.fromhex(ray.get_runtime_context().get_job_id())
    rows = [PlacementGroupTableData.FromString(row) for row in state._connect_and_get_accessor().get_placement_group_table()]
    return {row.placement_group_id for row in rows if row.creator_job_id == own and row.state != PlacementGroupTableData.REMOVED}


def _remove(groups: set[bytes]) -> None:
    """Ray Train leaves the placement group of a group of workers that failed to start; the next one would wait for it."""
    for name in groups:
        with suppress(Exception):
            remove_placement_group(PlacementGroup(PlacementGroupID(name)))


def _keep_logs(folder: Path) -> None:
    """What Ray's own processes on this node said of this job, beside what the workers said."""
    with suppress(Exception):
        job, node = ray.get_runtime_context().get_job_id(), global_worker.node
        for path in Path(node.get_logs_dir_path() if node else "").glob(f"worker-*-{job}-*"):
            if 0 < path.stat().st_size <= _LOG_BYTES:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / path.name)


def trained_model(prepared: Prepared, run_dir: Path) -> nn.Module:
    """The model as the workers left it, from the last checkpoint."""
    model = built(prepared.task)
    found, _ = CheckpointStore(run_dir / "checkpoints", mend=False).newest_good()
    resume = prepared.resolved.config.checkpoint.resume
    if found is None and resume not in (None, "auto"):  # another run's, with nothing left to do
        found, _ = resumable(str(resume), CheckpointStore(run_dir / "checkpoints", mend=False))
    if found is None:
        raise TrainingFailed(f"no good checkpoint in {run_dir / 'checkpoints'}")
    restore_model(found[1], model)
    return model
