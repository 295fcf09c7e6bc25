"""Seats for expert hosts: devices that are reserved together, each with an actor that trains, stands by, or is being started anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from experts.actor_host import ExpertHost
from orchestrator.runtime.cluster.session import answers, first_line
from orchestrator.runtime.expert_parallel.host_worker import rehearse, succeed

_STARTS = 3  # that may fail in a row
_LATER_SECONDS = 600.0  # after which it is tried again


@dataclass
class _Host:
    actor: Any
    warm: Any
    life: Any
    node: str | None = None
    pid: int = 0


@dataclass
class _Failed:
    """Starts of a host that came to nothing, in a row."""

    times: int
    error: BaseException
    at: float


class HostPool:
    """The seats of a run, by number. Where a host is lost another is started on its seat; it is ready once it has loaded what it needs."""

    def __init__(
        self, count: int, gpu: bool, assignment: Any, place: tuple[str, int], variables: Mapping[str, str]
    ) -> None:
        """``assignment`` is a reference to what the hosts are to train, ``place`` where they meet. ``variables`` of their environment
        say what a process imports as it starts: each node keeps one that is ready for the next host."""
        self._variables, self._succeeded = dict(variables), set[str]()
        self.count, self._gpu, self._sent, self._place = count, gpu, assignment, place
        self._group = placement_group(
            [{"GPU": 1.0} if gpu else {"CPU": 1.0}] * count, strategy="PACK" if gpu else "SPREAD"
        )
        self._seats: dict[int, _Host] = {}
        self._homes: dict[int, str] = {}
        self._failed: dict[int, _Failed] = {}

    def reserve(self, seconds: float) -> bool:
        """Whether the devices are there; then hosts are started on them."""
        if not self._seats and self._group.wait(seconds):
            for number in range(self.count):
                self.start(number)
        return bool(self._seats)

    def start(self, number: int) -> None:
        """A new host on a seat, in place of the one that was there, if any."""
        self.end(number)
        self._succeeded.discard(self._homes.get(number, ""))
        where = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        actor = ExpertHost.options(  # pyright: ignore[reportAttributeAccessIssue]
            num_cpus=0 if self._gpu else 1,
            num_gpus=1 if self._gpu else 0,
            scheduling_strategy=where,
            max_restarts=0,
            runtime_env={"env_vars": self._variables},
        ).remote()
        self._seats[number] = _Host(
            actor, actor.warm.remote(rehearse, self._sent, self._place), actor.live.remote()
        )

    def end(self, number: int, frozen: bool = False) -> None:
        """``frozen``: it may wake up, and go on as if nothing had happened. Ray asks a process to go first, and waits."""
        seat = self._seats.pop(number, None)
        if seat is None:
            return
        if frozen and seat.node is not None:
            where = NodeAffinitySchedulingStrategy(seat.node, soft=False)
            with suppress(Exception):
                _kill.options(scheduling_strategy=where).remote(seat.pid)
        with suppress(Exception):
            ray.kill(seat.actor)

    def actor(self, number: int) -> Any:
        return self._seats[number].actor

    def node(self, number: int) -> str | None:
        """Where the host of a seat is, or the last one was."""
        return self._homes.get(number)

    def look(self, busy: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Seats whose host is ready, and those whose host is being started. One that died, while it started or while it stood by, is
        started again, up to a few times; those that are ``busy`` are someone else's care."""
        for number, seat in list(self._seats.items()):
            if number not in busy:
                self._look_at(number, seat)
        for number, failed in list(self._failed.items()):
            if number not in self._seats and monotonic() - failed.at > _LATER_SECONDS:
                self._failed.pop(number)
                self.start(number)
        ready = tuple(number for number, seat in sorted(self._seats.items()) if seat.node is not None)
        return ready, tuple(number for number in sorted(self._seats) if number not in ready)

    def _look_at(self, number: int, seat: _Host) -> None:
        call = seat.warm if seat.node is None else seat.life
        if not ray.wait([call], timeout=0)[0]:
            return
        try:
            node, seat.pid = ray.get(call)
            seat.node = self._homes[number] = str(node)
            self._failed.pop(number, None)
            if self._variables and seat.node not in self._succeeded:
                self._succeeded.add(seat.node)
                seat.actor.warm.remote(succeed)
        except RayError as error:
            before = self._failed[number].times if number in self._failed else 0
            self._failed[number] = _Failed(
                before + 1, error.cause if isinstance(error, RayTaskError) else error, monotonic()
            )
            if number in self.given_up:
                self.end(number)
            else:
                self.start(number)

    def rule_out(self, number: int, error: BaseException) -> None:
        """The host of that seat is not fit to train."""
        self.end(number)
        self._failed[number] = _Failed(_STARTS, error, monotonic())

    @property
    def given_up(self) -> set[int]:
        """Seats whose hosts have failed again and again to start, or were ruled out. They are tried again much later."""
        return {number for number, failed in self._failed.items() if failed.times >= _STARTS}

    @property
    def error(self) -> BaseException | None:
        """What the last start failed of, if any did."""
        latest = max(self._failed.values(), key=lambda failed: failed.at, default=None)
        return latest.error if latest is not None else None

    @property
    def complaint(self) -> str:
        return first_line(self.error) if self.error is not None else ""

    def startable(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Of these seats those on nodes that are there: a host whose node is gone may be started never."""
        hopeful = [number for number in numbers if number not in self.given_up]
        return tuple(
            number for number in hopeful if (home := self._homes.get(number)) is None or node_answers(home)
        )

    def close(self) -> None:
        for number in list(self._seats):
            self.end(number)
        with suppress(Exception):
            remove_placement_group(self._group)


def node_answers(node: str) -> bool:
    """Whether a node is there: Ray takes half a minute to miss one that was killed."""
    found = next((entry for entry in ray.nodes() if entry["NodeID"] == node), None)
    return (
        found is not None
        and found["Alive"]
        and answers(f"{found['NodeManagerAddress']}:{found['NodeManagerPort']}")
    )


@ray.remote(num_cpus=0, max_retries=0)
def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
