"""The pool of hosts on a real Ray: hosts are reserved together, become ready, are restarted and
excluded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from harness.hosts.cluster import RayCluster, connected
from harness.hosts.idle_hosts import wait_until
from harness.hosts.idle_worker import preload_or_die, rehearse_in_file
from orchestrator.errors import TrainingFailed
from orchestrator.runtime.expert_parallel import host_pool as module
from orchestrator.runtime.expert_parallel.host_pool import HostPool

pytestmark = [pytest.mark.ray]
STORE_ADDRESS = ("127.0.0.1", 1)


@pytest.fixture(scope="module")
def node_id(shared_cluster: RayCluster) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, connected(shared_cluster) as node_id:
        patch.setattr(module, "preload", preload_or_die)
        yield node_id


MakePool = Callable[..., HostPool]
warnings: list[str] = []
"""Those of the pools of one test."""


@pytest.fixture
def make_pool(node_id: str, tmp_path: Path) -> Iterator[MakePool]:
    """``make_pool(size, deaths)``: a pool whose first ``deaths`` hosts die while they start."""
    pools: list[HostPool] = []
    warnings.clear()

    def make(size: int, deaths: int = 0) -> HostPool:
        path = tmp_path / f"deaths{len(pools)}"
        path.write_text("dies\n" * deaths)
        pools.append(HostPool(size, False, str(path), STORE_ADDRESS, {}, warnings.append))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_hosts_are_reserved_together_and_become_ready(make_pool: MakePool, node_id: str) -> None:
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    assert [pool.node_id(host_id) for host_id in (0, 1)] == [node_id] * 2
    assert pool.startable((0, 1)) == (0, 1)
    pool.stop(1)
    assert pool.poll() == ((0,), ())
    assert pool.node_id(1) == node_id, "the node of the last host is still known"
    pool.start(1)
    assert pool.poll()[1] == (1,), "a new host is being started"
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    pool._reserved_nodes[1] = "a-node-that-is-gone"
    assert pool.startable((0, 1)) == (0,)


def test_a_device_on_a_lost_node_is_given_back_and_another_is_reserved(
    make_pool: MakePool, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's control store would try without a pause to move a device that stays reserved."""
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    first = pool._reservations[1]
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)
    pool._reserved_nodes[1] = pool._node_ids[1] = "a-node-that-is-gone"
    pool._bundle = {"CPU": 99.0}  # more than the cluster has
    pool.start(1)
    wait_until(lambda: placement_group_table(first)["state"] == "REMOVED")
    assert pool.poll() == ((0,), (1,)), "there is no device for it"
    assert 1 not in pool._hosts, "no actor is created"
    assert pool.startable((0, 1)) == (0,)
    pool.stop(1)
    assert pool.poll() == ((0,), ()), "it is not awaited after its end"
    pool._give_back(1)
    pool._bundle = {"CPU": 1.0}
    pool.start(1)
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    assert pool.node_id(1) == node_id
    assert pool._reservations[1] is not first


def test_a_device_that_another_program_took_is_waited_for_with_all_others(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2)
    monkeypatch.setattr(module, "_DIVIDE_SECONDS", 0.2)
    one = pool._reserve_one
    monkeypatch.setattr(pool, "_reserve_one", lambda nodes: one("a-node-that-is-gone"))
    wait_until(lambda: pool._gang is not None and pool._gang.wait(1.0))
    assert not pool.reserve(1.0)
    assert (pool._reservations, pool.poll()) == ({}, ((), ()))
    monkeypatch.undo()
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool._hosts.keys() == {0, 1})


def test_devices_of_nodes_that_ray_knows_to_be_lost_are_given_back(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)
    place = pool._reservations[1]
    pool.stop(1)
    pool._reserved_nodes[1] = "a-node-that-is-gone"
    pool.poll()
    assert 1 not in pool._reservations
    wait_until(lambda: placement_group_table(place)["state"] == "REMOVED")


def test_hosts_have_the_priority_of_a_program_that_the_user_starts(make_pool: MakePool) -> None:
    pool = make_pool(1)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0,), ()))
    assert os.getpriority(os.PRIO_PROCESS, pool._hosts[0].pid) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.extended
def test_standbys_on_gpus_rehearse_once_while_others_train(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "rehearse", rehearse_in_file)
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    pool.poll(busy=(0,))
    pool._gpu = True
    pool.poll()
    pool.poll(busy=(0, 1))
    actor = pool.actor(1)
    ray.get(actor.rendezvous_address.remote())
    path = tmp_path / "deaths0.rehearsals"
    assert not path.exists(), "neither on CPUs, nor before there is a group, nor while the host trains"
    pool.poll(busy=(0,))
    pool.poll(busy=(0,))
    ray.get(actor.rendezvous_address.remote())
    assert path.read_text() == f"{pool._hosts[1].pid}\n"


def test_more_hosts_than_the_cluster_has_are_not_reserved(make_pool: MakePool) -> None:
    pool = make_pool(5)
    assert not pool.reserve(0.5), "the cluster has four CPUs"
    assert pool.poll() == ((), ())


@pytest.mark.extended
def test_a_host_that_dies_while_it_starts_is_started_again(make_pool: MakePool) -> None:
    pool = make_pool(1, deaths=2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0,), ()))
    assert pool.excluded == set()
    assert pool._failed_starts == {}, "only failures in a row count"


@pytest.mark.extended
def test_a_host_that_dies_repeatedly_is_excluded(make_pool: MakePool) -> None:
    pool = make_pool(1, deaths=99)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((), ()))
    assert pool.excluded == {0}
    assert pool.startable((0,)) == ()
    (warning,) = warnings
    assert "host 0 could not be started 3 times" in warning
    assert "tried again in 10 minutes" in warning


def test_a_host_that_is_lost_whenever_it_joins_is_excluded(make_pool: MakePool) -> None:
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    error = TrainingFailed("host 1 was lost")
    for _ in range(2):
        pool.join_failed(1, error)
    pool.joined((0, 1))
    for _ in range(2):
        pool.join_failed(1, error)
    assert pool.excluded == set(), "only failures in a row count"
    pool.join_failed(1, error)
    assert pool.excluded == {1}


@pytest.mark.extended
def test_a_closed_pool_leaves_nothing_behind(make_pool: MakePool) -> None:
    pool = make_pool(2)
    wait_until(lambda: pool.reserve(1.0))
    wait_until(lambda: pool.poll() == ((0, 1), ()))
    actors = [pool.actor(host_id) for host_id in (0, 1)]
    pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors])
    pool.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    states = [placement_group_table(place)["state"] for place in pool._reservations.values()]
    assert len(states) == 2
    wait_until(
        lambda: all(placement_group_table(p)["state"] == "REMOVED" for p in pool._reservations.values())
    )
