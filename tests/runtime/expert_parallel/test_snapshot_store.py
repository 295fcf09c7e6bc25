"""The snapshot store with hosts of a real Ray that train nothing: snapshots outlive their hosts and
nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError

from harness.hosts.cluster import RayCluster, connected
from harness.hosts.idle_hosts import IdlePool, idle_pool, kill_and_wait
from harness.hosts.idle_worker import SNAPSHOT_BYTES, snapshot_value
from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences
from orchestrator.runtime.expert_parallel.snapshot_store import SnapshotStore

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def session(shared_cluster: RayCluster) -> Iterator[None]:
    with connected(shared_cluster):
        yield


@pytest.fixture
def pool(session: None) -> Iterator[IdlePool]:
    with idle_pool() as pool:
        yield pool


def make_store(pool: IdlePool, warn: Callable[[str], None] = print) -> SnapshotStore:
    return SnapshotStore(pool, warn)  # pyrefly: ignore[bad-argument-type]


def collect_until(store: SnapshotStore, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        store.collect()
        time.sleep(0.01)


def contents(references: tuple[SnapshotReferences, ...]) -> list[tuple[int, int]]:
    """Return the rank of each snapshot and the byte that its parts are filled with."""
    found: list[tuple[int, int]] = []
    for reference in references:
        rank = reference.header.rank
        own: Any = ray.get(reference.own)
        dense: Any = ray.get(reference.dense)
        assert (own.size, dense.size) == (SNAPSHOT_BYTES, 0 if rank else SNAPSHOT_BYTES)
        assert len({*own.tolist(), *dense.tolist()}) == 1
        found.append((rank, int(own[0])))
    return found


def expected(generation: int, step: int) -> list[tuple[int, int]]:
    """Return the contents of a complete set of two hosts."""
    return [(rank, snapshot_value(generation, step, rank)) for rank in (0, 1)]


def test_snapshots_outlive_their_hosts(pool: IdlePool) -> None:
    pool.start(0, 1)
    pool.join(0, 0, 1)
    store = make_store(pool)
    store.follow(0, (1, 0))
    (main_call,) = store.pending_calls(all_hosts=False)
    assert store._fetches[main_call].host_id == 1, "the main host is the first member"
    assert len(store.pending_calls(all_hosts=True)) == 2
    store.follow(0, (0, 1))
    assert (store.step, store.references()) == (-1, ())
    pool.run_segment("put", 1, 0, 1)
    collect_until(store, lambda: store.step == 1)
    (cost,) = store.take_costs()
    assert cost.stall_s == 0.25, "the slowest host's"
    assert cost.transfer_s > 1e9, "since it was taken, which these hosts date to 1970"
    assert store.take_costs() == []
    pool.run_segment("put", 2, 0)
    collect_until(store, lambda: bool(store._incoming))
    assert store.step == 1, "the set of step 2 is not complete"
    for host_id in (0, 1):
        kill_and_wait(pool.actor(host_id))
    store.collect()
    assert contents(store.references()) == expected(0, 1)
    store.clear()
    assert (store.step, store.references()) == (-1, ())


def test_sets_do_not_pile_up_while_backups_are_slow(pool: IdlePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next set comes in once the one before is complete; hosts that are ahead wait meanwhile."""
    pool.start(0, 1)
    pool.join(0, 0, 1)
    store = make_store(pool)
    store.follow(0, (0, 1))
    pool.run_segment("put", 1, 0, 1)
    collect_until(store, lambda: store.step == 1)
    monkeypatch.setattr(store, "_is_backed_up", lambda incoming: False)
    pool.run_segment("put", 2, 0, 1)
    collect_until(store, lambda: 2 in store._incoming and len(store._incoming[2].references) == 2)
    pool.run_segment("put", 3, 0, 1)
    fourth = [pool.actor(host_id).run_segment.remote(("put", 4)) for host_id in (0, 1)]
    for _ in range(20):
        store.collect()
        assert ray.wait(fourth, timeout=0.02)[0] == [], "the mailbox holds the snapshot of step 3"
    assert (store.step, list(store._incoming), store._fetches) == (1, [2], {})
    monkeypatch.undo()
    collect_until(store, lambda: store.step == 4)
    assert contents(store.references()) == expected(0, 4)


@pytest.mark.extended
def test_the_rest_of_a_set_that_is_lost_is_not_kept(pool: IdlePool) -> None:
    pool.start(0, 1)
    pool.join(0, 0, 1)
    store = make_store(pool)
    store.follow(0, (0, 1))
    pool.run_segment("put", 1, 0)
    collect_until(store, lambda: 1 in store._incoming)
    store._incoming[1].lost = True
    store.collect()
    pool.run_segment("put", 1, 1)
    pool.run_segment("put", 2, 0, 1)
    collect_until(store, lambda: store.step == 2)
    assert contents(store.references()) == expected(0, 2)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("new_step", [3, 2], ids=["other step", "same step"])
def test_a_snapshot_of_an_earlier_generation_is_not_accepted(pool: IdlePool, new_step: int) -> None:
    """Host 0 puts step 2 in generation 0. The store fetches it only when generation 1 has begun."""
    pool.start(0, 1, 2)
    store = make_store(pool)
    pool.join(0, 0, 1)
    store.follow(0, (0, 1))
    pool.run_segment("put", 1, 0, 1)
    collect_until(store, lambda: store.step == 1)
    pool.run_segment("put", 2, 0)
    pool.stop(1)
    pool.join(1, 0, 2)
    store.follow(1, (0, 2))
    pool.run_segment("put", new_step, 2)
    collect_until(store, lambda: new_step in store._incoming and len(store._fetches) == 1)
    # The old snapshot of host 0 has arrived: only its next fetch is open. With the new one of host
    # 2 it would make a complete set, if their generations were not compared.
    collect_until(store, lambda: not ray.wait(list(store._fetches), timeout=0.2)[0])
    assert store.step == 1
    assert list(store._incoming[new_step].references) == [1], "only the new host's snapshot"
    assert contents(store.references()) == expected(0, 1)
    pool.run_segment("put", new_step, 0)
    collect_until(store, lambda: store.step == new_step)
    assert contents(store.references()) == expected(1, new_step)


def test_a_backup_replaces_a_snapshot_on_a_dead_node(pool: IdlePool) -> None:
    """The node of host 1 does not answer: its snapshot comes from host 0, which keeps the backup in
    its memory."""
    pool.node_ids = (pool.node_ids[0], "a node that is gone")
    pool.start(0, 1)
    pool.join(0, 0, 1)
    store = make_store(pool)
    store.follow(0, (0, 1))
    for step in (1, 2):
        pool.run_segment("put", step, 0, 1)
        collect_until(store, lambda step=step: store.step == step)
    kill_and_wait(pool.actor(1))
    references = store.references()
    assert store._complete is not None
    assert references[1] != store._complete[1].references[1], "not the snapshot itself"
    assert contents(references) == expected(0, 2)
    pool.stop(0)
    assert store.references() == (), "the backup is lost too"


def test_a_node_without_memory_for_backups_gets_none(pool: IdlePool) -> None:
    pool.node_ids = (pool.node_ids[0], "another node")
    pool.start(0, 1)
    pool.join(0, 0, 1)
    store = SnapshotStore(pool, print, backups=False)  # pyrefly: ignore[bad-argument-type]
    store.follow(0, (0, 1))
    pool.run_segment("put", 1, 0, 1)
    collect_until(store, lambda: store.step == 1)
    assert store._complete is not None
    assert store._complete[1].backup_calls == {}


@ray.remote(num_cpus=0, max_retries=0)
def lose_snapshot() -> None:
    """Fail as a backup does whose snapshot is lost."""
    raise ObjectLostError("00", None, "")


def test_a_set_survives_the_loss_of_a_backup_but_not_of_a_snapshot(pool: IdlePool) -> None:
    pool.node_ids = (pool.node_ids[0], "another node")
    pool.start(0, 1)
    pool.join(0, 0, 1)
    warnings: list[str] = []
    store = make_store(pool, warnings.append)
    store.follow(0, (0, 1))
    pool.run_segment("put", 1, 0, 1)
    collect_until(store, lambda: store.step == 1)
    assert store._complete is not None
    snapshots = store._complete[1]
    assert snapshots.backup_hosts == {0: 1, 1: 0}

    snapshots.backup_calls[1] = lose_snapshot.remote()
    ray.wait([snapshots.backup_calls[1]])
    assert not store._is_backed_up(snapshots)
    store._incoming = {2: snapshots}
    store._update_complete()
    assert store.step == 1, "the set of step 2 never becomes complete, so the one before is kept"
    assert not store.expects(2), "and it is not waited for"
    assert store.expects(3)
    assert store._incoming == {}

    # A backup host without memory: the set is complete without that backup, with a warning.
    snapshots.backup_calls[1] = pool.actor(0).load_backup.remote((9, 9, 9))[0]
    ray.wait([snapshots.backup_calls[1]])
    assert store._is_backed_up(snapshots)
    assert (snapshots.backup_hosts, len(warnings)) == ({0: 1}, 1)

    # A backup host that died: its death is reported as a failure, and needs no warning.
    kill_and_wait(pool.actor(1))
    snapshots.backup_calls[0] = pool.actor(1).store_backup.remote((0, 0, 1), None, None, 0)
    ray.wait([snapshots.backup_calls[0]])
    assert store._is_backed_up(snapshots)
    assert (snapshots.backup_hosts, len(warnings)) == ({}, 1)
    collect_until(store, lambda: store.dead_hosts == {1})
    store.follow(1, (0,))
    assert store.dead_hosts == set()
