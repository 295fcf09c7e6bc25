"""The members of a group and what they were asked last: who has answered, who has failed, and who is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from orchestrator.errors import OrchestratorError
from orchestrator.runtime.expert_parallel.host_pool import HostPool


def _device_is_gone(error: BaseException) -> bool:
    """After an error of CUDA's own, but for one of memory, nothing works in that process any more."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return not isinstance(cause, OrchestratorError) and "CUDA error" in str(cause)


def died(*ranks: int) -> str:
    *most, last = map(str, ranks)
    return f"hosts {', '.join(most)} and {last} were lost" if most else f"host {last} was lost"


class GroupCalls:
    """Calls to all members at once."""

    def __init__(self, seats: HostPool) -> None:
        self._seats = seats
        self.members: tuple[int, ...] = ()
        self.calls: dict[Any, int] = {}
        self.answers: dict[int, Any] = {}
        self.raised: dict[int, BaseException] = {}
        self.lost: dict[int, str] = {}

    def form(self, members: tuple[int, ...]) -> None:
        self.members, self.raised, self.lost = members, {}, {}

    def ask(self, call: Callable[[Any, int, int], Any]) -> None:
        """``call(actor, seat, rank)`` begins what each member is to do."""
        self.answers = {}
        there = [(seat, rank) for rank, seat in enumerate(self.members) if seat not in self.lost]
        self.calls = {call(self._seats.actor(seat), seat, rank): seat for seat, rank in there}

    def rank(self, seat: int) -> int:
        return self.members.index(seat)

    def hear(self) -> None:
        """Take in the answers that are there."""
        done = ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[0] if self.calls else []
        for call in done:
            seat = self.calls.pop(call)
            try:
                self.answers[seat] = ray.get(call)
            except Exception as error:
                if isinstance(error, RayActorError) and not isinstance(
                    error, RayTaskError
                ):  # its own death, not one it met
                    self.lost[seat] = died(self.rank(seat))
                elif _device_is_gone(error):
                    self.give_up(
                        seat,
                        f"host {self.rank(seat)} lost its device: {next(iter(str(error).splitlines()), '')}",
                    )
                else:
                    self.raised[seat] = error

    def give_up(self, seat: int, why: str, frozen: bool = False) -> None:
        """A member that does not answer, or is of no use: it is ended, and not waited for."""
        self.lost[seat] = why
        self.calls = {call: other for call, other in self.calls.items() if other != seat}
        self._seats.end(seat, frozen)

    @property
    def broken(self) -> bool:
        return bool(self.raised or self.lost)

    @property
    def first(self) -> Any:
        """What the first member answered; None where it has not."""
        return self.answers.get(self.members[0])
