"""Copies of the hosts' state, while they train: fetched as soon as each is made, owned by the driver, and held in the memory of the node
where they were made; where there are several nodes, a host on another one keeps a second copy. The set before is let go of only when
every host's new one has been acknowledged, so there is always one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from orchestrator.runtime.cluster.session import first_line
from orchestrator.runtime.expert_parallel.host_pool import HostPool, node_answers


@dataclass
class _Set:
    """The copies of one step, by rank."""

    generation: int
    size: int
    refs: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    nodes: dict[int, str | None] = field(default_factory=dict)
    buddies: dict[int, int] = field(default_factory=dict)
    """The seat that keeps a second copy, by rank."""
    acknowledged: dict[int, Any] = field(default_factory=dict)
    """Calls that end when it is kept, by rank."""
    lost: bool = False
    """Whether a first copy is gone before there was a second."""


class SnapshotStore:
    """The newest whole set of copies, and those that are coming in."""

    def __init__(self, seats: HostPool, warn: Callable[[str], None]) -> None:
        self._seats, self._warn = seats, warn
        self._members: tuple[int, ...] = ()
        self.gone: set[int] = set()
        """Members that turned out to be dead."""
        self._epoch, self._dropped = -1, set[int]()
        self._asked: dict[Any, tuple[int, Any, Any]] = {}
        self._coming: dict[int, _Set] = {}
        self._whole: tuple[int, _Set] | None = None

    @property
    def step(self) -> int:
        """The step of the newest whole set; -1 where there is none."""
        return self._whole[0] if self._whole is not None else -1

    def calls(self, all_of_them: bool) -> list[Any]:
        """What to wait for: the main host's copy tells that the others' are there too, or about to be. To be woken by each would take
        time from the hosts where they share the driver's machine."""
        main = self._members[:1]
        return [call for call, (seat, _, _) in self._asked.items() if all_of_them or seat in main]

    def follow(self, epoch: int, members: tuple[int, ...]) -> None:
        """Fetch the copies of these hosts from now on."""
        self._epoch, self._members, self._coming, self.gone = epoch, members, {}, set()
        self._dropped = set()
        asked = {seat for seat, _, actor in self._asked.values() if actor is self._actor(seat)}
        for seat in members:
            if seat not in asked:
                self._ask(seat)

    def forget(self) -> None:
        """None of them can be used."""
        self._whole, self._coming = None, {}

    def _actor(self, seat: int) -> Any:
        with suppress(KeyError):
            return self._seats.actor(seat)

    def _ask(self, seat: int) -> None:
        actor = self._seats.actor(seat)
        header, data = actor.copy.remote()
        self._asked[header] = seat, data, actor

    def look(self) -> None:
        """Take in what has come."""
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for header in done:
            seat, data, actor = self._asked.pop(header)
            try:
                told = ray.get(header)
            except RayError:
                if actor is self._actor(seat) and seat in self._members:
                    self.gone.add(seat)
                continue
            if actor is self._actor(seat):
                self._ask(seat)
            if told.epoch == self._epoch:
                self._add(told, seat, header, data)
        self._settle()

    def _add(self, told: Any, seat: int, header: Any, data: Any) -> None:
        made = self._coming.setdefault(told.step, _Set(told.epoch, told.size))
        made.refs[told.rank], made.nodes[told.rank] = (header, data), self._seats.node(seat)
        others = [
            other for other in self._members if self._seats.node(other) not in (None, made.nodes[told.rank])
        ]
        if others:
            made.buddies[told.rank] = others[told.rank % len(others)]
            keeper = self._seats.actor(made.buddies[told.rank])
            made.acknowledged[told.rank] = keeper.keep.remote(
                (told.epoch, told.rank, told.step), header, data, self.step
            )

    def _settle(self) -> None:
        """The newest set that is whole takes the place of all before it. One that can never be is let go of."""
        for step in sorted(self._coming, reverse=True):
            made = self._coming[step]
            if len(made.refs) == made.size and not self._open(made):
                self._whole = step, made
                self._coming = {later: one for later, one in self._coming.items() if later > step}
                return
        self._dropped |= {step for step, made in self._coming.items() if made.lost}
        self._coming = {step: made for step, made in self._coming.items() if not made.lost}

    def expects(self, step: int) -> bool:
        """Whether the set of that step may still become whole."""
        return self.step < step and step not in self._dropped

    def _open(self, made: _Set) -> bool:
        """Whether a second copy is still under way, or can no longer be made because the first is lost. Where its keeper died or has
        no room, the first one is there still: that is one loss, and the set stands it."""
        for rank, call in list(made.acknowledged.items()):
            if not ray.wait([call], timeout=0)[0]:
                return True
            try:
                ray.get(call)
            except RayError as error:
                met = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(met, ObjectLostError):
                    made.lost = True
                    return True
                made.buddies.pop(rank)
                made.acknowledged.pop(rank)
                if not isinstance(met, RayActorError):
                    self._warn(
                        f"a second copy of host {rank}'s state could not be kept on another node: {first_line(met)}"
                    )
        return False

    def references(self) -> tuple[tuple[Any, Any], ...]:
        """Of the newest whole set: from where they were made, or where that node is gone from who kept them. None where one is lost."""
        if self._whole is None:
            return ()
        step, made = self._whole
        there = {node: node_answers(node) for node in set(made.nodes.values()) if node is not None}
        found: list[tuple[Any, Any]] = []
        for rank, refs in sorted(made.refs.items()):
            if there.get(made.nodes[rank] or "", True):
                found.append(refs)
                continue
            keeper = self._actor(made.buddies.get(rank, -1))
            if keeper is None:
                return ()
            header, data = keeper.kept.remote((made.generation, rank, step))
            found.append((header, data))
        return tuple(found)
