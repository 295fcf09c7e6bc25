"""Ranks of process groups that a test makes leave, over a store that the test keeps as the driver
does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from experts.hosts.group import Group, GroupFactory
from experts.hosts.membership import GroupMembership
from orchestrator.train.group.stores import open_store, tcp_store

Address = tuple[str, int]
# Elements of a tensor that exceeds the buffers of sockets, so that a collective needs all its peers.
LARGE = 300_000

_KEY_TIMEOUT_S = 60.0


@contextmanager
def rendezvous() -> Iterator[tuple[Any, Address]]:
    """A store, and its address for the ranks."""
    store, address = open_store("127.0.0.1", "")
    yield store, address


def wait_for_keys(store: Any, *keys: str) -> None:
    deadline = time.monotonic() + _KEY_TIMEOUT_S
    while not store.check(list(keys)):
        missing = [key for key in keys if not store.check([key])]
        assert time.monotonic() < deadline, f"{missing} of {keys} were not set"
        time.sleep(0.005)


def wait_until_at_most(count: Callable[[], int], limit: int) -> int:
    """Return the count as soon as it is at most the limit, or after three seconds."""
    deadline = time.monotonic() + 3.0
    while count() > limit and time.monotonic() < deadline:
        time.sleep(0.02)
    return count()


def all_reduced(group: Group, elements: int = 3) -> list[float]:
    """The sum over all ranks of rank + 1, in each element."""
    value = torch.full((elements,), float(group.rank + 1))
    group.all_reduce(value).wait()
    return value.tolist()


class GroupHost:
    """A rank that leaves its group when the test sets the key ``NAME/leave``, and sets
    ``NAME/waits/RANK`` when it waits."""

    def __init__(self, address: Address, rank: int) -> None:
        self.rank = rank
        self.store = tcp_store(*address, False, 60, "")
        self.membership = GroupMembership()
        # A connection of its own: it serves another thread.
        self._watch_store = tcp_store(*address, False, 60, "")

    def join(self, name: str, rank: int, size: int) -> GroupFactory:
        """Become a member of a generation of groups."""
        self.membership = GroupMembership()
        threading.Thread(target=self._watch, args=(name, self.membership), daemon=True).start()
        return GroupFactory(self.store, name, rank, size, self.membership)

    def _watch(self, name: str, membership: GroupMembership) -> None:
        polls_waiting = 0
        while not membership.left:
            time.sleep(0.01)
            polls_waiting = polls_waiting + 1 if membership.observe().waiting else 0
            if polls_waiting == 10:
                self._watch_store.set(f"{name}/waits/{self.rank}", "")
            if self._watch_store.check([f"{name}/leave"]):
                membership.leave()
