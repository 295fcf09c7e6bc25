"""Expert parallel: Ray actors that each own a device and host some of the experts. They form their group themselves, and
train in segments of a few seconds; between segments they answer to the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experts.actor_host import ExpertHost
from orchestrator.runtime.driving import Ended, failure_of_worker, told_error, worst
from orchestrator.runtime.recovery import Failure
from orchestrator.runtime.worker import Assignment, at_work

_SEGMENT_SECONDS = 2.0
_FIRST_SEGMENT = 5  # steps, before it is known how long they take
_SAVING_SECONDS = 60.0  # for a checkpoint that is being written when a host is lost
_GRACE_SECONDS = 3.0  # for the others to fail too, once one has: of several errors the cause is told


class Hosts:
    """A group of hosts: reserved, brought together, at work a segment at a time. Nothing here waits longer than it is told to."""

    def __init__(self, assignment: Assignment, hosts: int, gpu: bool) -> None:
        self._assignment, self._size, self._gpu = assignment, hosts, gpu
        self._deadline = perf_counter() + assignment.prepared.resolved.config.parallel.resource_timeout
        self._group = placement_group([{"GPU": 1.0} if gpu else {"CPU": 1.0}] * hosts, strategy="PACK" if gpu else "SPREAD")
        self._actors: list[Any] = []
        self._calls: list[Any] = []
        self._done: Callable[[list[Any]], Ended | None] = self._met
        self._steps, self._begun, self._status = _FIRST_SEGMENT, 0.0, ""

    def wait(self, seconds: float) -> Ended | None:
        if not self._actors:
            return self._reserve(seconds)
        done, under_way = ray.wait(self._calls, num_returns=len(self._calls), timeout=seconds)
        if any(_error(call) for call in done):
            return self._failure()
        return None if under_way else self._done(ray.get(self._calls))

    def _reserve(self, seconds: float) -> Ended | None:
        if self._group.wait(seconds):
            self._actors = [_host(self._group, rank, self._gpu) for rank in range(self._size)]
            self._calls = [self._actors[0].meeting_place.remote()]
        elif perf_counter() > self._deadline:
            what = "GPUs" if self._gpu else "CPUs"
            return Ended(failure=Failure("resources", f"{self._size} {what} for the hosts of experts were not to be had in time"))
        return None

    def _met(self, answers: list[Any]) -> None:
        sent = ray.put(self._assignment)
        opened = [actor.open.remote(at_work, sent, answers[0], rank, self._size) for rank, actor in enumerate(self._actors)]
        self._calls, self._done = opened, self._opened

    def _opened(self, _: list[Any]) -> None:
        self._done = self._advanced
        self._advance()

    def _advanced(self, answers: list[Any]) -> None:
        """All hosts have done a segment: the next one, or the end."""
        if answers[0] is not None:
            self._status = str(answers[0].status)
            self._calls, self._done = [actor.close.remote() for actor in self._actors], lambda _: Ended(self._status)
            return
        took = max(1e-3, perf_counter() - self._begun)
        self._steps = max(1, min(4 * self._steps, round(self._steps * _SEGMENT_SECONDS / took)))
        self._advance()

    def _advance(self) -> None:
        self._begun = perf_counter()
        self._calls = [actor.advance.remote(self._steps) for actor in self._actors]

    def _failure(self) -> Ended:
        """What went wrong, once the others have had time to say so too, and the main host to finish a checkpoint."""
        ray.wait(self._calls, num_returns=len(self._calls), timeout=_GRACE_SECONDS)
        if any((self._assignment.run_dir / "checkpoints").glob(".writing_*")):
            ray.wait(self._calls[:1], timeout=_SAVING_SECONDS)
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        raised = {rank: error for rank, call in enumerate(self._calls) if call in done and (error := _error(call)) is not None}
        failure = worst([failure_of_worker(rank, _cause(error), isinstance(error, RayActorError)) for rank, error in raised.items()])
        told = raised.get(failure.rank if failure.rank is not None else -1)
        return Ended(failure=failure, error=told_error(_cause(told), told, failure) if told is not None else None)

    def close(self) -> None:
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        with suppress(Exception):
            remove_placement_group(self._group)


def _host(group: PlacementGroup, rank: int, gpu: bool) -> Any:
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return ExpertHost.options(  # pyright: ignore[reportAttributeAccessIssue]
        num_cpus=0 if gpu else 1, num_gpus=1 if gpu else 0, scheduling_strategy=where, max_restarts=0
    ).remote()


def _error(call: Any) -> BaseException | None:
    """What a call that has ended raised."""
    try:
        ray.get(call)
    except Exception as error:
        return error
    return None


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
