"""Data parallel: workers under Ray Train's ``TorchTrainer``, one ``fit`` for each attempt."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchTrainer

from orchestrator.record.events import EventLog
from orchestrator.runtime.bootstrap import Assignment, Meeting, worker
from orchestrator.runtime.cluster.prestart import for_controller, for_worker
from orchestrator.runtime.cluster.session import first_line
from orchestrator.runtime.driver import Ended, failure_of_worker, told_error
from orchestrator.runtime.ray_internals import run_train_controller, worker_health_errors
from orchestrator.runtime.recovery import Failure, worst

_NEEDLESS = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class Lean(TorchTrainer):
    """Ray Train's trainer without the actors that only Tune and Ray Data need."""

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback
            for callback in super()._create_default_callbacks()
            if type(callback).__name__ not in _NEEDLESS
        ]

    def _initialize_and_run_controller(self, **parts: Any) -> Result:
        """As Ray Train does it, with one thing more in the environment: what the process imports as it starts."""
        return run_train_controller(for_controller(), parts)


class Fit:
    """``TorchTrainer.fit`` in a thread of its own, so that this one can watch, and Ray leaves the signals alone."""

    def __init__(self, assignment: Assignment, workers: int, gpu: bool, log: EventLog) -> None:  # noqa: ARG002
        self._trainer = _trainer(assignment, workers, gpu)
        self._ended: Ended | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="ray-train", daemon=True).start()

    def _run(self) -> None:
        try:
            result = self._trainer.fit()
            self._ended = Ended(str((result.return_value or {}).get("status")))
        except BaseException as error:  # handed on to the thread that waits
            self._ended = ended_by(error)
        finally:
            self._done.set()

    def wait(self, seconds: float) -> Ended | None:
        return self._ended if self._done.wait(seconds) else None

    def close(self) -> None:
        pass


def _trainer(assignment: Assignment, workers: int, gpu: bool) -> Lean:
    config = assignment.prepared.resolved.config
    resources = {"GPU": 1.0, "CPU": 0.0} if gpu else {"CPU": 1.0}
    return Lean(
        worker,
        train_loop_config={"assignment": ray.put(assignment)},
        torch_config=Meeting(assignment.prepared.plan.backend.value, config.parallel.max_failures > 0),  # pyright: ignore[reportArgumentType]
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker=resources,
            placement_strategy="PACK" if gpu else "SPREAD",
        ),
        run_config=RunConfig(
            name=f"attempt-{uuid.uuid4().hex[:12]}",
            storage_path=str(Path(assignment.run_dir, "logs", "ray_train")),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            worker_runtime_env={"env_vars": for_worker(config.task)},
        ),
    )


def ended_by(error: BaseException) -> Ended:
    """What an attempt failed of."""
    if not isinstance(error, WorkerGroupError):
        kind = "resources" if isinstance(error, TrainingFailedError) else "error"
        return Ended(
            failure=Failure(kind, first_line(getattr(error, "controller_failure", error))), error=error
        )
    raised = dict(sorted(error.worker_failures.items()))
    lost = (RayActorError, *worker_health_errors())
    failure = worst(
        [failure_of_worker(rank, _cause(one), isinstance(_cause(one), lost)) for rank, one in raised.items()]
    )
    told = raised.get(failure.rank if failure.rank is not None else -1, error)
    return Ended(failure=failure, error=told_error(_cause(told), told, failure))


def _cause(raised: BaseException) -> BaseException:
    for name in ("_base_exc", "health_check_failure"):
        raised = getattr(raised, name, raised)
    return raised
