"""The calls to all members of a group: results, errors, and hosts that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.failures import (
    cause_of,
    classify,
    error_for_user,
    lost_host,
    merge_deaths,
)
from orchestrator.runtime.recovery import Failure, LossCause
from orchestrator.types import first_line


class GroupCalls:
    """Calls all members of a group at once and collects the results."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.members: tuple[int, ...] = ()
        """Host ids in the order of ranks."""
        self.pending: dict[Any, int] = {}
        """The host id of each call that has not returned."""
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        """The exceptions of members that live on."""
        self.lost: dict[int, Failure] = {}
        """Members that cannot be used any more."""

    def set_members(self, members: tuple[int, ...]) -> None:
        """Begin a new group."""
        self.members = members
        self.errors = {}
        self.lost = {}

    def rank(self, host_id: int) -> int:
        return self.members.index(host_id)

    def call_all(self, call: Callable[[Any, int, int], Any]) -> None:
        """Start ``call(actor, host_id, rank)`` for each member that is not lost."""
        self.results = {}
        self.pending = {}
        for rank, host_id in enumerate(self.members):
            if host_id not in self.lost:
                reference = call(self._pool.actor(host_id), host_id, rank)
                self.pending[reference] = host_id

    def collect(self) -> None:
        """Take in the calls that have returned."""
        if not self.pending:
            return
        done, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)
        for reference in done:
            host_id = self.pending.pop(reference)
            try:
                self.results[host_id] = ray.get(reference)
            except Exception as error:
                self._add_error(host_id, error)

    def _add_error(self, host_id: int, error: BaseException) -> None:
        failure = classify(error, self.rank(host_id), noun="host")
        match failure.loss:
            case None:
                self.errors[host_id] = error
            case "died":
                self.lost[host_id] = failure
            case _:
                self.drop(host_id, "device", f"lost its device: {first_line(cause_of(error))}")

    def drop(self, host_id: int, cause: LossCause, detail: str, frozen: bool = False) -> None:
        """End a member that does not respond or cannot be used. Its call is not waited for."""
        self.lost[host_id] = lost_host(self.rank(host_id), cause, detail)
        self.pending = {call: other for call, other in self.pending.items() if other != host_id}
        self._pool.stop(host_id, frozen)

    @property
    def has_failed(self) -> bool:
        return bool(self.errors or self.lost)

    @property
    def main_result(self) -> Any:
        """The result of the main host; None until it has returned."""
        return self.results.get(self.members[0])

    def failures(self, retry_task_errors: bool) -> tuple[Failure, ...]:
        """Return what went wrong in this group: losses first, then the errors by host id."""
        failures = list(self.lost.values())
        for host_id, error in sorted(self.errors.items()):
            failure = classify(error, self.rank(host_id), noun="host", retry_task_errors=retry_task_errors)
            failures.append(failure)
        return merge_deaths(failures)

    def error_for_user(self, failure: Failure) -> BaseException | None:
        """Return the error to show for a failure; None if no exception of a member belongs to it."""
        raised = {self.rank(host_id): error for host_id, error in self.errors.items()}
        if failure.rank is None or failure.rank not in raised:
            return None
        return error_for_user(raised[failure.rank], failure)
