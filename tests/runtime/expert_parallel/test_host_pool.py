"""Seats for hosts on a real Ray: reserved together, ready once they have rehearsed, started anew, and given up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from orchestrator.runtime.expert_parallel import host_pool as module
from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.ray_internals import reload_auth_mode
from tests.support import idle_worker as idle_work
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.ray]
PLACE = ("127.0.0.1", 1)


@pytest.fixture(scope="module")
def here(shared_cluster: Cluster) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, shared_cluster.environment[name])
        patch.setattr(module, "rehearse", idle_work.rehearse)
        reload_auth_mode()
        ray.init(address=shared_cluster.address, log_to_driver=False)
        yield str(ray.get_runtime_context().get_node_id())
        ray.shutdown()
    reload_auth_mode()


@pytest.fixture
def made(here: str, tmp_path: Path) -> Iterator[Callable[..., HostPool]]:
    """``made(count, deaths)``: seats whose first hosts die while they rehearse, so many of them."""
    plans: list[HostPool] = []

    def make(count: int, deaths: int = 0) -> HostPool:
        path = tmp_path / f"deaths{len(plans)}"
        path.write_text("dies\n" * deaths)
        plans.append(HostPool(count, False, str(path), PLACE, {}))
        return plans[-1]

    yield make
    for plan in plans:
        plan.close()


def until(there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_seats_are_reserved_and_their_hosts_get_ready(made: Callable[..., HostPool], here: str) -> None:
    seats = made(2)
    until(lambda: seats.reserve(1.0))
    until(lambda: seats.look() == ((0, 1), ()))
    assert [seats.node(number) for number in (0, 1)] == [here] * 2
    assert seats.startable((0, 1)) == (0, 1)
    seats.end(1)
    assert seats.look() == ((0,), ())
    assert seats.node(1) == here, "where its host was is known still"
    seats.start(1)
    assert seats.look()[1] == (1,), "a new host is coming"
    until(lambda: seats.look() == ((0, 1), ()))
    seats._homes[1] = "a node that is gone"
    assert seats.startable((0, 1)) == (0,)


def test_what_is_not_there_is_not_had(made: Callable[..., HostPool]) -> None:
    seats = made(5)
    assert not seats.reserve(0.5), "the cluster has four"
    assert seats.look() == ((), ())


def test_who_dies_while_it_starts_is_started_again(made: Callable[..., HostPool]) -> None:
    seats = made(1, deaths=2)
    until(lambda: seats.reserve(1.0))
    until(lambda: seats.look() == ((0,), ()))
    assert seats.given_up == set()
    assert seats._failed == {}, "it counts from the last that got ready"


def test_who_dies_again_and_again_is_given_up(made: Callable[..., HostPool]) -> None:
    seats = made(1, deaths=99)
    until(lambda: seats.reserve(1.0))
    until(lambda: seats.look() == ((), ()))
    assert seats.given_up == {0}
    assert seats.startable((0,)) == ()


def test_nothing_stays(made: Callable[..., HostPool]) -> None:
    seats = made(2)
    until(lambda: seats.reserve(1.0))
    until(lambda: seats.look() == ((0, 1), ()))
    pids = ray.get([seats.actor(number).__ray_call__.remote(lambda self: os.getpid()) for number in (0, 1)])
    seats.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    until(lambda: placement_group_table(seats._group)["state"] == "REMOVED")
