"""Process groups in real processes: the collectives against torch's own, generation after
generation, and the abort.

``test_group_leave`` has groups that are left because a peer is frozen, killed or never arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from experts.hosts import group as group_module
from experts.hosts.group import Group, GroupFactory
from experts.hosts.membership import GroupLeft, GroupMembership, WaitState
from harness.hosts.group_hosts import (
    LARGE,
    Address,
    GroupHost,
    all_reduced,
    rendezvous,
    wait_for_keys,
    wait_until_at_most,
)
from harness.hosts.ranks import gloo, run_ranks

# --- collectives


def collectives(rank: int, size: int, store_path: str, address: Address) -> list[bool]:
    """Whether each collective equals torch's own, for a group that can be left and for torch's
    group in our form."""
    generator = torch.Generator().manual_seed(rank)
    factory = GroupHost(address, rank).join("only", rank, size)
    equal: list[bool] = []
    with gloo(rank, size, store_path):
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        for group in (factory.form(), Group(rank, size, dist.group.WORLD)):
            for dtype in (torch.float64, torch.float32, torch.int64, torch.uint8):
                tensor = torch.randint(0, 9, (7, 2), generator=generator).to(dtype)
                equal += [torch.equal(ours, theirs) for ours, theirs in results(group, tensor)]
    factory.close()
    return equal


def results(group: Group, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The results of each collective, ours and torch's."""
    ours, theirs = tensor.clone(), tensor.clone()
    group.all_reduce(ours).wait()
    dist.all_reduce(theirs)
    yield ours, theirs
    ours, theirs = tensor.clone(), tensor.clone()
    group.all_reduce_max(ours).wait()
    dist.all_reduce(theirs, dist.ReduceOp.MAX)
    yield ours, theirs
    ours, theirs = tensor.clone(), tensor.clone()
    group.broadcast(ours).wait()
    dist.broadcast(theirs, 0)
    yield ours, theirs
    assert group.size == 3
    rows = [[0, 3, 4], [7, 0, 0], [2, 2, 3]]  # by sender and receiver; some are zero
    send_counts = rows[group.rank]
    receive_counts = [row[group.rank] for row in rows]
    ours, theirs = (torch.zeros(sum(receive_counts), 2, dtype=tensor.dtype) for _ in range(2))
    group.all_to_all(ours, tensor, receive_counts, send_counts).wait()
    dist.all_to_all_single(theirs, tensor, receive_counts, send_counts)
    yield ours, theirs


def test_collectives_equal_those_of_torch() -> None:
    with rendezvous() as (_, address):
        for equal in run_ranks(collectives, 3, address):
            assert equal == [True] * 32


def group_of_one(rank: int, size: int, _: str, address: Address) -> tuple[list[float], int, bool]:
    host = GroupHost(address, rank)
    factory = host.join("only", rank, size)
    result = all_reduced(factory.form())
    factory.close()
    waits = host.membership.observe()
    return result, waits.num_completed, waits.waiting


def test_a_group_of_one() -> None:
    """Three waits: until all have arrived, until the group has formed, and for the sum."""
    with rendezvous() as (_, address):
        assert run_ranks(group_of_one, 1, address) == [([1.0, 1.0, 1.0], 3, False)]


def wait_for_slow_peer(rank: int, size: int, _: str, address: Address) -> list[float]:
    group_module._CONNECT_TIMEOUT = timedelta(seconds=1)
    factory = GroupHost(address, rank).join("only", rank, size)
    group = factory.form()
    if rank == 1:
        time.sleep(2.5)
    result = all_reduced(group, LARGE)[:2]
    factory.close()
    return result


def test_collectives_have_no_timeout() -> None:
    """A peer may take longer than the time in which hosts must connect."""
    with rendezvous() as (_, address):
        assert run_ranks(wait_for_slow_peer, 2, address) == [[3.0, 3.0]] * 2


# --- generations


def run_generations(
    rank: int,
    size: int,
    _: str,
    address: Address,
    num_generations: int,
    left: bool,
) -> list[tuple[int, int]]:
    """Open files and threads after each generation.

    ``left``: each ends while a collective hangs."""
    host = GroupHost(address, rank)
    counts: list[tuple[int, int]] = []
    for generation in range(num_generations):
        factory = host.join(f"generation-{generation}", rank, size)
        groups = [factory.form(), factory.form()]
        assert all_reduced(groups[generation % 2]) == [6.0] * 3
        host.store.set(f"done/{generation}/{rank}", "")
        wait_for_keys(host.store, *(f"done/{generation}/{other}" for other in range(size)))
        if left and rank != generation % size:
            work = groups[0].all_reduce(torch.ones(LARGE))
            host.membership.leave()
            with pytest.raises((GroupLeft, RuntimeError)):
                work.wait()
            del work
        host.membership.leave()
        factory.close()
        del groups, factory
        threads = wait_until_at_most(count_group_threads, 0)
        fewest_files = min((files for files, _ in counts), default=10**6)
        counts.append((wait_until_at_most(count_open_files, fewest_files), threads))
    return counts


def count_group_threads() -> int:
    return sum(thread.name in ("forming", "leaving") for thread in threading.enumerate())


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("left", [False, True], ids=["closed", "left"])
def test_files_and_threads_do_not_grow_with_generations(left: bool) -> None:
    with rendezvous() as (_, address):
        for counts in run_ranks(run_generations, 3, address, 20, left, timeout=100.0):
            files = [num_files for num_files, _ in counts]
            threads = [num_threads for _, num_threads in counts]
            assert files[-1] <= max(files[:4]), files
            assert max(threads) == 0, threads


# --- groups whose work the device waits for


class DeviceBackend:
    """A backend that is aborted instead of left, such as NCCL's."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self.abort = abort


def form_device_groups(
    monkeypatch: pytest.MonkeyPatch, membership: GroupMembership, abort: Callable[[], object]
) -> GroupFactory:
    """Form two groups of one host, over a backend that cannot be run here."""
    monkeypatch.setattr(group_module, "_new_backend", lambda *_: DeviceBackend(abort))
    factory = GroupFactory(HashStore(), "generation0", 0, 1, membership)
    factory.form("gloo")
    factory.form("nccl")
    factory.form("nccl")
    return factory


@pytest.mark.parametrize("left", [True, False], ids=["left", "closed"])
def test_device_groups_are_aborted_when_they_are_left_or_closed(
    monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """Both at once: the abort of one may wait for the kernels of the other."""
    membership = GroupMembership()
    aborted = threading.Barrier(3)
    factory = form_device_groups(monkeypatch, membership, lambda: aborted.wait(30.0))
    assert aborted.n_waiting == 0
    if left:
        membership.leave()
    else:
        factory.close()
    aborted.wait(30.0)
    factory.close()


def test_a_device_group_that_was_forming_when_its_generation_was_left_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    membership = GroupMembership()
    aborts = threading.Semaphore(0)
    factory = form_device_groups(monkeypatch, membership, aborts.release)
    membership.leave()
    assert aborts.acquire(timeout=30.0)
    assert aborts.acquire(timeout=30.0)
    factory._to_abort.append(DeviceBackend(aborts.release))
    assert aborts.acquire(timeout=30.0)
    factory.close()


def test_the_wait_of_a_device_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat then shows a device that waits, and counts the waits of all groups."""
    membership = GroupMembership()
    states: list[WaitState] = []
    work = SimpleNamespace(wait=lambda: states.append(membership.observe()))
    backend = SimpleNamespace(allreduce=lambda *_: work, abort=lambda: None)
    monkeypatch.setattr(group_module, "_new_backend", lambda *_: backend)
    factory = GroupFactory(HashStore(), "generation0", 0, 1, membership)
    groups = [factory.form("nccl"), factory.form("nccl")]
    num_before = membership.observe().num_completed
    for group in groups:
        group.all_reduce(torch.zeros(1)).wait()
    factory.close()
    assert states == [(num_before, True), (num_before + 1, True)]
    assert membership.observe() == (num_before + 2, False)
