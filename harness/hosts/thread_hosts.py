"""Any number of hosts as threads of one process, with real code from the rendezvous up to the first step.

Only the lowest layer is fake: collectives meet in memory instead of gloo, and the store is a table in
memory. Both count what each host does. ``run_gloo_threads`` has real groups, for few hosts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ReduceOp

from experts.hosts import group as group_module
from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupMembership
from orchestrator.train.group.world import World, recoverable_world

_LIMIT_S = 300.0


@dataclass
class HostCounts:
    """What one host did: its collectives, the operations on the store, and its waits."""

    collectives: Counter[str] = field(default_factory=Counter)
    store: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    """Waits for a key or a connection. How often a wait looks depends on time and is not counted."""
    most_keys: int = 0
    """The most keys that a single look at the store asked for."""

    @property
    def rounds(self) -> int:
        """Points where the host waits for all others."""
        return sum(self.collectives.values()) + self.waits


class CountingStore(Store):
    """A host's connection to a store that all hosts share."""

    def __init__(self, shared: HashStore, counts: HostCounts) -> None:
        super().__init__()
        self._shared = shared
        self._counts = counts

    def set(self, key: str, value: Any) -> None:
        self._counts.store["set"] += 1
        self._shared.set(key, value.decode() if isinstance(value, bytes) else value)

    def get(self, key: str) -> bytes:
        self._counts.store["get"] += 1
        return self._shared.get(key)

    def add(self, key: str, value: int) -> int:
        self._counts.store["add"] += 1
        return self._shared.add(key, value)

    def deleteKey(self, key: str) -> bool:
        self._counts.store["delete"] += 1
        return self._shared.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        self._counts.most_keys = max(self._counts.most_keys, len(keys))
        return self._shared.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_LIMIT_S)) -> None:
        self._counts.store["wait"] += 1
        self._shared.wait(keys, timeout)


class _Meeting:
    """One group of hosts: the last host to arrive combines the tensors of all."""

    def __init__(self, size: int) -> None:
        self._tensors: list[Tensor] = [torch.empty(0)] * size
        self._combine: Callable[[Tensor], Tensor] = torch.clone
        self._result = torch.empty(0)
        self._barrier = threading.Barrier(size, action=self._meet)

    def _meet(self) -> None:
        self._result = self._combine(torch.stack(self._tensors))

    def combine(self, rank: int, tensor: Tensor, combine: Callable[[Tensor], Tensor]) -> None:
        self._tensors[rank] = tensor.clone()
        self._combine = combine
        self._barrier.wait(_LIMIT_S)
        result = self._result
        # No host begins the next collective before all have this one's result.
        tensor.copy_(result)
        self._barrier.wait(_LIMIT_S)


class _Done:
    def wait(self, timeout: timedelta) -> None: ...


class ThreadBackend:
    """The process group of one host, as far as joining uses it."""

    def __init__(self, meeting: _Meeting, rank: int, counts: HostCounts) -> None:
        self._meeting = meeting
        self._rank = rank
        self._counts = counts

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        is_max = options.reduceOp == ReduceOp.MAX
        return self._collective(
            "all-reduce", tensors[0], (lambda rows: rows.amax(0)) if is_max else _sum_of_rows
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Done:
        assert options.rootRank == 0
        return self._collective("broadcast", tensors[0], lambda rows: rows[0])

    def _collective(self, name: str, tensor: Tensor, combine: Callable[[Tensor], Tensor]) -> _Done:
        self._counts.collectives[name] += 1
        self._meeting.combine(self._rank, tensor, combine)
        return _Done()


def _sum_of_rows(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=rows.dtype)


class _CountingMembership(GroupMembership):
    def __init__(self, counts: HostCounts) -> None:
        super().__init__()
        self._counts = counts

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self._counts.waits += 1
        super().wait_until(condition)


@contextmanager
def _meeting_in_memory(size: int, all_counts: list[HostCounts]) -> Iterator[None]:
    """Let groups be formed in memory. The n-th groups of all hosts are one group."""
    meetings: dict[int, _Meeting] = {}
    num_formed: Counter[int] = Counter()
    lock = threading.Lock()

    def new_backend(_: str, __: Any, rank: int, *___: Any) -> ThreadBackend:
        with lock:
            number = num_formed[rank]
            num_formed[rank] += 1
            meeting = meetings.setdefault(number, _Meeting(size))
        return ThreadBackend(meeting, rank, all_counts[rank])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "_new_backend", new_backend)
        # The groups count as gloo's, whose collectives the host waits for.
        patch.setattr(group_module, "ProcessGroupGloo", ThreadBackend)
        yield


def run_thread_hosts(size: int, function: Callable[[World], Any]) -> tuple[list[Any], list[HostCounts]]:
    """Call ``function(world)`` on so many hosts that join one group.

    Return the results and the counts of all hosts, by rank."""
    all_counts = [HostCounts() for _ in range(size)]
    shared = HashStore()

    def run_host(rank: int) -> Any:
        counts = all_counts[rank]
        store = CountingStore(shared, counts)
        factory = GroupFactory(store, "generation0", rank, size, _CountingMembership(counts))
        with recoverable_world(factory, torch.device("cpu"), "gloo") as world:
            return function(world)

    with _meeting_in_memory(size, all_counts), ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run_host, rank) for rank in range(size)]
        return [future.result(_LIMIT_S) for future in futures], all_counts


def run_gloo_threads(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Call ``function(world)`` on hosts with real groups over gloo, and return the results by rank.

    Processes would take seconds to import torch."""
    store = HashStore()

    def run_host(rank: int) -> Any:
        factory = GroupFactory(store, "generation0", rank, size, GroupMembership())
        with recoverable_world(factory, torch.device("cpu"), "gloo") as world:
            return function(world)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_host, range(size), timeout=_LIMIT_S))
