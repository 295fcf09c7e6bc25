"""Expert parallel: Ray actors that each own a device and host some of the experts. They form their group themselves, and
train in segments of a few seconds; between segments they answer to the driver."""

from __future__ import annotations

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
_GRACE_SECONDS = 3.0  # for the others to fail too, once one has: of several errors the cause is told


class Hosts:
    """A group of hosts at work."""

    def __init__(self, assignment: Assignment, hosts: int, gpu: bool) -> None:
        self._group = placement_group([{"GPU": 1.0} if gpu else {"CPU": 1.0}] * hosts, strategy="PACK" if gpu else "SPREAD")
        self._actors: list[Any] = []
        self._calls: list[Any] = []
        self._ended: Ended | None = None
        self._steps, self._begun, self._opening = 0, 0.0, True
        if not self._group.wait(assignment.prepared.resolved.config.parallel.resource_timeout):
            what = "GPUs" if gpu else "CPUs"
            self._ended = Ended(failure=Failure("resources", f"{hosts} {what} for the hosts of experts were not to be had in time"))
            return
        self._actors = [_host(self._group, rank, gpu) for rank in range(hosts)]
        self._open(ray.put(assignment))

    def _open(self, assignment: Any) -> None:
        try:
            place = ray.get(self._actors[0].meeting_place.remote())
        except RayActorError as error:
            self._ended = Ended(failure=failure_of_worker(0, error, lost=True))
            return
        size = len(self._actors)
        self._calls = [actor.open.remote(work_of, assignment, place, rank, size) for rank, actor in enumerate(self._actors)]

    def wait(self, seconds: float) -> Ended | None:
        if self._ended is not None:
            return self._ended
        done, under_way = ray.wait(self._calls, num_returns=len(self._calls), timeout=seconds)
        failed = any(_error(call) for call in done)
        if failed or not under_way:
            self._ended = self._failure() if failed else self._next()
        return self._ended

    def _next(self) -> Ended | None:
        """All hosts have done a segment: the next one, or the end."""
        answers = ray.get(self._calls)
        now = perf_counter()
        if self._opening:
            self._opening, self._steps = False, _FIRST_SEGMENT
        elif answers[0] is not None:
            return Ended(str(answers[0].status))
        else:
            self._steps = max(1, min(4 * self._steps, round(self._steps * _SEGMENT_SECONDS / max(1e-3, now - self._begun))))
        self._begun = now
        self._calls = [actor.advance.remote(self._steps) for actor in self._actors]
        return None

    def _failure(self) -> Ended:
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=_GRACE_SECONDS)
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


def work_of(assignment: Assignment, place: tuple[str, int], rank: int, size: int) -> Any:
    """What a host works at: a worker's part of the run."""
    return at_work(assignment, place, rank, size)


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
