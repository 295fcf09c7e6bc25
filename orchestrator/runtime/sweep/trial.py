"""One trial of a sweep, as Ray Tune runs it.

The trial is an actor without a device, which leads the workers that have one. Workers and their
imports are kept from trial to trial; they live in the trial's placement group and end with it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import ray
from ray.tune import Trainable
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experts.hosts.actor_host import ExpertHost, common_address
from orchestrator.config.sweep.objective import THROUGHPUT
from orchestrator.config.sweep.space import Point
from orchestrator.errors import OrchestratorError, OutOfMemory
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.trial_worker import TrialSetup, run_trial_worker
from orchestrator.types import first_line

if TYPE_CHECKING:
    from orchestrator.measure.trial import TrialResult

_GRACE_SECONDS = 2.0
"""Time for the other workers to fail too, once one has failed: the first error may be a
consequence of theirs."""
MAX_RETRIES = 2
"""Times that a trial is tried again after one of its processes was lost. The cause may be the trial
itself, such as a lack of memory for which the system kills it."""
_MAX_TRIALS_PER_GROUP = 40
"""Trials of a group of workers. Each leaves the sockets of its process group open."""
_RESULT_FIELDS = (
    "samples_per_second", "interval", "units_per_second", "step_seconds", "steps",
    "peak_memory_bytes", "phases", "train_loss", "validation_loss", "metrics",
)  # fmt: skip


class SweepTrial(Trainable):
    """Tune's trial. No failure of a worker ends the actor: a failed trial is a row of the ledger."""

    def setup(self, config: dict[str, Any], setup: TrialSetup | None = None) -> None:
        assert setup is not None
        self._trial_setup = setup
        self._group = _WorkerGroup(setup, config["workers"])
        self._num_trials = 0
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._num_trials += 1
        if self._num_trials % _MAX_TRIALS_PER_GROUP == 0:
            self._group.kill()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._number = config["trial"]
        self._point = config["point"]
        self._workers = config["workers"]
        self._began = perf_counter()
        self._num_slices = 0
        self._retries = 0

    def step(self) -> dict[str, Any]:
        """Run a slice of the trial, and return the report to Tune.

        After the loss of a worker, the trial is tried again from its beginning, a few times."""
        while True:
            try:
                result, plan_fields = self._run_next_part()
            except TrialFailure as failure:
                if failure.is_lost and self._retries < MAX_RETRIES:
                    self._retries += 1
                    continue
                tries = f" ({self._retries + 1} tries)" if self._retries else ""
                row = self._row(failure.status, failure.reason + tries)
                return _report(row, self._trial_setup, done=True)
            row = add_measurement(self._row("completed"), result, plan_fields)
            if result.done:
                self._group.close()
            return _report(row, self._trial_setup, result.done)

    def _run_next_part(self) -> tuple[TrialResult, dict[str, Any]]:
        """Run the next slice; in a group that was started anew, those before it too."""
        part = 1 / self._trial_setup.slices
        if not self._num_slices or not self._group.is_running:
            self._group.open(self._point)
            for _ in range(self._num_slices):
                self._group.run_part(part)
        result = self._group.run_part(part)
        self._num_slices += 1
        return result

    def _row(self, status: str, reason: str = "") -> TrialRow:
        return TrialRow(
            self._number,
            self._point,
            status,
            reason,
            seconds=perf_counter() - self._began,
            workers=self._workers,
            retries=self._retries or None,
        )

    def cleanup(self) -> None:
        self._group.kill()


def add_measurement(row: TrialRow, result: TrialResult, plan_fields: dict[str, Any]) -> TrialRow:
    """Return the row with what was measured and what the plan made of the point."""
    measured = {name: getattr(result, name) for name in _RESULT_FIELDS}
    if not math.isfinite(result.interval):  # a single block of steps has no confidence interval
        measured["interval"] = None
    start_seconds = max(0.0, row.seconds - result.seconds)
    return replace(row, start_seconds=start_seconds, **measured, **plan_fields)


def _report(row: TrialRow, setup: TrialSetup, done: bool) -> dict[str, Any]:
    """Return the report to Tune: a score, the larger the better, and the row for the ledger.

    The score of throughput is that of one device, so that ASHA does not stop trials for having
    few devices. Our own ``ended`` says that a trial is complete; Tune sets its ``done`` for
    trials that it stops, too.
    """
    report = {"row": asdict(row), "ended": done, "done": done}
    score = row.score(setup.objective)
    if score is None:  # Tune compares trials with a score only
        return report
    if setup.objective == THROUGHPUT:
        score /= max(1, row.workers or 1)
    return {"score": score, **report}


# --- the workers of a trial


class TrialFailure(Exception):
    """A failed trial: the status of its row, the reason in a line, and whether a process was lost."""

    def __init__(self, status: str, reason: str, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.is_lost = is_lost


class _WorkerGroup:
    """The workers of a trial, one for each bundle of its placement group.

    They start when they are first needed, and again after one was lost or left the others waiting.
    """

    def __init__(self, setup: TrialSetup, size: int) -> None:
        self._setup = setup
        self._size = size
        self._setup_ref = ray.put(setup)
        self._actors: list[Any] = []

    @property
    def is_running(self) -> bool:
        return bool(self._actors)

    def open(self, point: Point) -> None:
        """Start the workers if there are none, and let them prepare the trial of a point."""
        if not self._actors:
            group = get_current_placement_group()
            assert group is not None, "a trial runs in a placement group of its own"
            self._actors = [self._start_worker(group, rank) for rank in range(self._size)]
        timeout_s = self._setup.config.parallel.resource_timeout
        addresses = self._wait([actor.rendezvous_address.remote() for actor in self._actors], timeout_s)
        address = common_address(addresses)
        calls = [
            actor.open.remote(run_trial_worker, self._setup_ref, dict(point), address, rank, self._size)
            for rank, actor in enumerate(self._actors)
        ]
        self._wait(calls)

    def _start_worker(self, group: PlacementGroup, rank: int) -> Any:
        bundle = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        return ExpertHost.options(  # pyrefly: ignore[missing-attribute]
            num_cpus=0 if self._setup.on_gpu else self._setup.cores,
            num_gpus=1 if self._setup.on_gpu else 0,
            scheduling_strategy=bundle,
            max_restarts=0,
        ).remote()

    def run_part(self, part: float) -> tuple[TrialResult, dict[str, Any]]:
        """Run a part of the trial on all workers; return the result of rank 0."""
        return self._wait([actor.run_segment.remote(part) for actor in self._actors])[0]

    def close(self) -> None:
        """Let the workers release the trial's resources.

        A failure here is not the trial's: the next gets new workers.
        """
        try:
            self._wait([actor.close.remote() for actor in self._actors])
        except TrialFailure:
            self.kill()

    def kill(self) -> None:
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        self._actors = []

    def _wait(self, calls: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Return the results of all calls.

        Raises TrialFailure if one fails, or if none ends within the timeout.
        """
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, timeout=timeout_s)
            if not done:
                self.kill()
                raise TrialFailure(
                    "failed",
                    f"workers did not start within {timeout_s:.0f} s: a node of the trial may be lost",
                    is_lost=True,
                )
            if any(_error_of(call) is not None for call in done):
                if pending:
                    ray.wait(pending, num_returns=len(pending), timeout=_GRACE_SECONDS)
                raise self._failure(calls)
        return ray.get(calls)

    def _failure(self, calls: list[Any]) -> TrialFailure:
        """Return the failure that is most likely the cause, and kill workers that are not usable any more."""
        ended, pending = ray.wait(calls, num_returns=len(calls), timeout=0)
        errors = {rank: _error_of(call) for rank, call in enumerate(calls) if call in ended}
        failures = [_worker_failure(rank, error) for rank, error in errors.items() if error is not None]
        # A lone worker that raised a known error is sound. After any other error it may be damaged
        # (CUDA's errors persist), and the peers of a failed worker may wait for it forever.
        known = all(failure.status in ("out_of_memory", "refused") for failure in failures)
        if pending or self._size > 1 or not known:
            self.kill()
        cause = min(failures, key=lambda failure: _CAUSES.index(failure.status))
        if cause.status == "out_of_memory":
            return cause
        return TrialFailure("failed", cause.reason, is_lost=cause.status == "lost")


_CAUSES = ("out_of_memory", "refused", "failed", "lost", "silence")
"""Statuses of workers, from the most likely cause of a group's failure to mere consequences."""
_STATUSES = {"worker": "lost", "memory": "out_of_memory", "communication": "silence", "error": "refused"}
"""Statuses by the kind of a worker's failure; all other kinds are ``failed``."""


def _error_of(call: Any) -> BaseException | None:
    try:
        ray.get(call)
    except Exception as error:
        return error
    return None


def _worker_failure(rank: int, error: BaseException) -> TrialFailure:
    """Return the failure of a worker as a status and one line."""
    from orchestrator.runtime.failures import cause_of, classify
    from orchestrator.train.device.memory import is_out_of_memory

    cause = cause_of(error)
    if is_out_of_memory(cause) or (isinstance(cause, OrchestratorError) and "out of memory" in str(cause)):
        error = OutOfMemory(first_line(cause))
    failure = classify(error, rank)
    status = _STATUSES.get(failure.kind, "failed")
    if status == "lost":
        return TrialFailure(status, f"{failure.message}: its process ended, or was killed for lack of memory")
    if status == "silence":
        return TrialFailure(status, "workers lost contact with each other")
    return TrialFailure(status, first_line(failure.message))
