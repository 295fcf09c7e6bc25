"""Data parallel: workers under Ray Train's ``TorchTrainer``, one ``fit`` per attempt."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from orchestrator.record.files.event_log import EventLog
from orchestrator.runtime.bootstrap import Assignment
from orchestrator.runtime.cluster.environment import priority_variables
from orchestrator.runtime.cluster.prestart import worker_variables
from orchestrator.runtime.data_parallel.worker import RendezvousConfig, train_worker
from orchestrator.runtime.driver import AttemptResult
from orchestrator.runtime.failures import classify_group
from orchestrator.runtime.ray_internals import disable_auto_connect, run_train_controller
from orchestrator.runtime.recovery import Failure
from orchestrator.runtime.recovery_log import RecoveryLog

Work = Callable[[dict[str, Any]], Any]
"""A function that every worker runs, with a reference to the assignment."""

_UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")
"""Callbacks of Ray Train that start an actor at each restart, and have no setting against that.

The first is for Tune: a detached actor, which never ends if its driver is killed in a cluster without a
dashboard, and takes 600 MB (Ray's issues 65443 and 62753). The second is for Ray Data."""
_CANCEL_SECONDS = 5.0


class LeanTrainer(TorchTrainer):  # pyrefly: ignore[invalid-inheritance]
    """Ray Train's trainer without the actors that only Tune and Ray Data need."""

    cancel: Callable[[], Any] | None = None
    """Ends ``fit`` from another thread; None before it has begun."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **parts: Any) -> Result:
        """Run the controller in this process, where it is a task that can be cancelled."""
        return asyncio.run(self._run_controller(parts))

    async def _run_controller(self, parts: dict[str, Any]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        return await run_train_controller(parts)


class WorkerGroup:
    """A group of workers that all run one function: ``TorchTrainer.fit`` in a thread.

    So the driver can watch, and Ray leaves the signal handlers alone."""

    def __init__(self, work: Work, assignment: Assignment, workers: int, gpu: bool) -> None:
        self.value: Any = None
        """The value that the function returned on rank 0."""
        self.failure: Failure | None = None
        self.error: BaseException | None = None
        """The error to show to the user, if the group has failed."""
        self._trainer = _trainer(work, assignment, workers, gpu)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self.value = self._trainer.fit().return_value
        except BaseException as error:  # reported to the driver's thread
            self.failure, self.error = classify_group(error)
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> AttemptResult | None:
        """Return how the group has ended; None if it goes on after the timeout."""
        if not self._done.wait(timeout_s):
            return None
        if self.failure is not None:
            return AttemptResult(failure=self.failure, error=self.error)
        return AttemptResult(str((self.value or {}).get("status")))

    def close(self) -> None:
        """End ``fit``, unless it has ended by itself."""
        if self._trainer.cancel is not None:
            with suppress(RuntimeError):  # the loop of its thread is closed: ``fit`` has ended
                self._trainer.cancel()
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            # The thread waits for workers to start. Once the cluster is gone, its next call to Ray would
            # start another cluster.
            disable_auto_connect()


def start_attempt(assignment: Assignment, workers: int, gpu: bool, *_: EventLog | RecoveryLog) -> WorkerGroup:
    """Start the workers of one attempt. Ray Train watches them; the driver alone writes into the logs."""
    return WorkerGroup(train_worker, assignment, workers, gpu)


def _trainer(work: Work, assignment: Assignment, workers: int, gpu: bool) -> LeanTrainer:
    config = assignment.prepared.resolved.config
    backend = assignment.prepared.plan.backend.value
    return LeanTrainer(
        work,
        train_loop_config={"assignment": ray.put(assignment)},
        torch_config=RendezvousConfig(backend),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker={"GPU": 1.0, "CPU": 0.0} if gpu else {"CPU": 1.0},
            placement_strategy="PACK" if gpu else "SPREAD",
        ),
        run_config=RunConfig(
            name=f"attempt-{uuid.uuid4().hex[:12]}",
            storage_path=str(Path(assignment.run_dir, "logs", "ray_train")),
            # The driver restarts the workers itself, after it has decided how many.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            worker_runtime_env={"env_vars": {**priority_variables(), **worker_variables(config)}},
        ),
    )
