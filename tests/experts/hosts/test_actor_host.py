"""The host actor on a real Ray: snapshots are fetched in order, and a host leaves its group while
it waits.

One host serves all tests; each test uses generations of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from experts.hosts.actor_host import Outbox
from experts.hosts.membership import GroupLeft
from harness.hosts.cluster import RayCluster, connected
from harness.hosts.idle_hosts import IdlePool, idle_pool
from harness.hosts.idle_worker import SNAPSHOT_BYTES, IdleHeader

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def pool(shared_cluster: RayCluster) -> Iterator[IdlePool]:
    with connected(shared_cluster), idle_pool() as pool:
        pool.start(0)
        yield pool


def step_of(header_reference: Any) -> int:
    header: Any = ray.get(header_reference)
    return header.step


@pytest.mark.extended
def test_a_host_puts_two_snapshots_and_waits_with_the_third(pool: IdlePool) -> None:
    pool.join(0, 0)
    host = pool.actor(0)
    first = host.next_snapshot.remote()  # before there is any
    assert pool.run_segment("put", 1, 0) == [1]
    assert pool.run_segment("put", 2, 0) == [2], "the first is being fetched"
    third = host.run_segment.remote(("put", 3))
    assert ray.wait([third], timeout=0.5)[0] == [], "the mailbox is full"
    second = host.next_snapshot.remote()
    assert ray.get(third) == 3
    last = host.next_snapshot.remote()
    assert [step_of(header) for header, _, _ in (first, second, last)] == [1, 2, 3]
    assert [int(ray.get(own)[-1]) for _, own, _ in (first, second, last)] == [1, 2, 3]


def test_a_host_leaves_its_group_while_it_waits(pool: IdlePool) -> None:
    host = pool.actor(0)
    pool.join(4, 0)
    call = host.run_segment.remote(("wait", 0))
    ray.get(host.leave.remote(3))
    assert ray.wait([call], timeout=0.3)[0] == [], "an earlier generation is another group"
    ray.get(host.leave.remote(4))
    with pytest.raises(RayTaskError) as caught:
        ray.get(call)
    assert isinstance(caught.value.cause, GroupLeft)
    pool.join(5, 0)
    assert pool.run_segment("go on", 7, 0) == [7], "the same process works in a new group"


def test_a_host_leaves_its_group_while_the_mailbox_is_full(pool: IdlePool) -> None:
    pool.join(10, 0)
    pool.run_segment("put", 1, 0)
    host = pool.actor(0)
    call = host.run_segment.remote(("put", 2))
    assert ray.wait([call], timeout=0.2)[0] == []
    ray.get(host.leave.remote(10))
    with pytest.raises(RayTaskError):
        ray.get(call)
    header, _, _ = host.next_snapshot.remote()
    pool.join(11, 0)
    pool.run_segment("put", 9, 0)
    assert step_of(header) in (1, 9)


def test_a_host_that_left_before_it_joined_does_not_wait(pool: IdlePool) -> None:
    host = pool.actor(0)
    ray.get(host.leave.remote(20))
    pool.join(20, 0)
    with pytest.raises(RayTaskError):
        pool.run_segment("wait", 0, 0)
    pool.join(21, 0)
    call = host.run_segment.remote(("wait", 0))
    assert ray.wait([call], timeout=0.2)[0] == []
    host.leave.remote(21)


def test_a_segment_granted_behind_one_that_fails_is_not_run(pool: IdlePool) -> None:
    pool.join(25, 0)
    host = pool.actor(0)
    failing, *behind = [host.run_segment.remote((action, 1)) for action in ("fail", "go on", "put")]
    with pytest.raises(RayTaskError):
        ray.get(failing)
    assert ray.get(behind) == [None, None]
    pool.join(26, 0)
    assert pool.run_segment("go on", 2, 0) == [2]


def test_a_segment_does_not_begin_in_a_group_that_was_left(pool: IdlePool) -> None:
    """The host had finished one segment, and had not begun the next, when the driver saw a failure."""
    pool.join(27, 0)
    host = pool.actor(0)
    ray.get(host.leave.remote(27))
    first, second = host.run_segment.remote(("go on", 1)), host.run_segment.remote(("go on", 2))
    with pytest.raises(RayTaskError) as caught:
        ray.get(first)
    assert isinstance(caught.value.cause, GroupLeft)
    assert ray.get(second) is None


def test_a_new_generation_begins_with_an_empty_mailbox(pool: IdlePool) -> None:
    pool.join(30, 0)
    pool.run_segment("put", 1, 0)
    pool.join(31, 0)
    pool.run_segment("put", 2, 0)
    header, _, _ = pool.actor(0).next_snapshot.remote()
    assert ray.get(header) == IdleHeader(31, 2, 0, 1)


def test_a_mailbox_replaces_nothing_that_was_not_fetched() -> None:
    outbox = Outbox()
    outbox.put(1, b"own", b"dense")
    with pytest.raises(RuntimeError, match="has not been fetched"):
        outbox.put(2, b"others", b"others")
    assert outbox.fetch() == (1, b"own", b"dense")
    outbox.put(2, b"others", b"others")


def test_backups_of_two_sets_are_kept_whatever_their_generation(pool: IdlePool) -> None:
    """The complete set, and the one that is coming in. After a loss a run may go back many steps."""
    host = pool.actor(0)
    part = np.ones(1, np.uint8)
    ray.get(host.store_backup.remote((4, 1, 900), part, part, None))
    for generation in (5, 6):
        for rank in (1, 2):
            ray.get(host.store_backup.remote((generation, rank, 500), part, part, (4, 400)))
    for gone in ((4, 1, 900), (5, 1, 500)):
        with pytest.raises(RayTaskError):
            ray.get(host.load_backup.remote(gone)[0])
    for rank in (1, 2):
        ray.get(host.load_backup.remote((6, rank, 500))[0])


def test_old_backups_are_deleted(pool: IdlePool) -> None:
    host = pool.actor(0)
    data = np.zeros(SNAPSHOT_BYTES, np.uint8)
    for step in (10, 20, 30):
        ray.get(host.store_backup.remote((0, 1, step), data + step, data[:1] + step + 1, (0, step - 10)))
    newest = ray.get(host.load_backup.remote((0, 1, 30)))
    assert [int(part[0]) for part in newest] == [30, 31], "the host's own part and the dense part"
    bytes_before, _ = host.load_backup.remote((0, 1, 20))
    assert int(ray.get(bytes_before)[0]) == 20, "kept until the next set is complete"
    with pytest.raises(RayTaskError):
        ray.get(host.load_backup.remote((0, 1, 10))[0])
