"""Seats for expert hosts: devices that are reserved together, each with an actor that trains, stands by, or is being started anew."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experts.actor_host import ExpertHost
from orchestrator.runtime.lodging import rehearse
from orchestrator.runtime.session import answers


@dataclass
class _Seat:
    actor: Any
    warm: Any
    node: str | None = None


class SeatPlan:
    """The seats of a run, by number. Where a host is lost another is started on its seat; it is ready once it has loaded what it needs."""

    def __init__(self, count: int, gpu: bool, assignment: Any, place: tuple[str, int]) -> None:
        """``assignment`` is a reference to what the hosts are to train, ``place`` where they meet."""
        self.count, self._gpu, self._sent, self._place = count, gpu, assignment, place
        self._group = placement_group([{"GPU": 1.0} if gpu else {"CPU": 1.0}] * count, strategy="PACK" if gpu else "SPREAD")
        self._seats: dict[int, _Seat] = {}
        self._homes: dict[int, str] = {}

    def reserve(self, seconds: float) -> bool:
        """Whether the devices are there; then hosts are started on them."""
        if not self._seats and self._group.wait(seconds):
            for number in range(self.count):
                self.start(number)
        return bool(self._seats)

    def start(self, number: int) -> None:
        """A new host on a seat, in place of the one that was there, if any."""
        self.end(number)
        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=number)
        actor = ExpertHost.options(  # pyright: ignore[reportAttributeAccessIssue]
            num_cpus=0 if self._gpu else 1, num_gpus=1 if self._gpu else 0, scheduling_strategy=where, max_restarts=0
        ).remote()
        self._seats[number] = _Seat(actor, actor.warm.remote(rehearse, self._sent, self._place))

    def end(self, number: int) -> None:
        seat = self._seats.pop(number, None)
        if seat is not None:
            with suppress(Exception):
                ray.kill(seat.actor)

    def actor(self, number: int) -> Any:
        return self._seats[number].actor

    def node(self, number: int) -> str | None:
        """Where the host of a seat is, or the last one was."""
        return self._homes.get(number)

    @property
    def warming(self) -> list[Any]:
        """Calls that end when a host is ready."""
        return [seat.warm for seat in self._seats.values() if seat.node is None]

    def look(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Seats whose host is ready, and those whose host is being started. One that died while it started is started again."""
        waiting = self.warming
        done = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
        for number, seat in list(self._seats.items()):
            if seat.warm in done and seat.node is None:
                try:
                    seat.node = self._homes[number] = str(ray.get(seat.warm))
                except RayActorError:
                    self.start(number)
        ready = tuple(number for number, seat in sorted(self._seats.items()) if seat.node is not None)
        return ready, tuple(number for number in sorted(self._seats) if number not in ready)

    def startable(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Of these seats those on nodes that are there: a host whose node is gone may be started never."""
        return tuple(number for number in numbers if (home := self._homes.get(number)) is None or node_answers(home))

    def close(self) -> None:
        for number in list(self._seats):
            self.end(number)
        with suppress(Exception):
            remove_placement_group(self._group)


def node_answers(node: str) -> bool:
    """Whether a node is there: Ray takes half a minute to miss one that was killed."""
    found = next((entry for entry in ray.nodes() if entry["NodeID"] == node), None)
    return found is not None and found["Alive"] and answers(f"{found['NodeManagerAddress']}:{found['NodeManagerPort']}")
