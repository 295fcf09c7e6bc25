"""Groups that are left, in real processes, because a peer is frozen, killed or never arrives."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experts.hosts import group as group_module
from experts.hosts.group import AsyncWork, Group
from experts.hosts.membership import GroupLeft
from harness.hosts.group_hosts import (
    LARGE,
    Address,
    GroupHost,
    all_reduced,
    rendezvous,
    wait_for_keys,
    wait_until_at_most,
)
from harness.hosts.ranks import start_ranks
from orchestrator.train.group.comm_errors import is_communication_error


def all_to_all(group: Group) -> AsyncWork:
    counts = [LARGE] * group.size
    return group.all_to_all(torch.empty(LARGE * 3), torch.ones(LARGE * 3), counts, counts)


COLLECTIVES: dict[str, Callable[[Group], AsyncWork]] = {
    "all-reduce": lambda group: group.all_reduce(torch.ones(LARGE)),
    "all-reduce of the maximum": lambda group: group.all_reduce_max(torch.ones(LARGE)),
    "all-to-all": all_to_all,
}


# --- frozen peers


def leave_frozen_peer(
    rank: int,
    size: int,
    _: str,
    address: Address,
    collective: str,
) -> dict[str, Any]:
    """Form two groups, and wait in both while the last rank is frozen; then form groups without
    it."""
    host = GroupHost(address, rank)
    factory = host.join("first", rank, size)
    group = factory.form()
    other_group = factory.form()
    outcome: dict[str, Any] = {"before": all_reduced(group), "pid": os.getpid()}
    host.store.set(f"formed/{rank}", "")
    wait_for_keys(host.store, "go")
    if rank == size - 1:
        time.sleep(600)
    works = [COLLECTIVES[collective](group), other_group.all_reduce(torch.ones(LARGE))]
    with pytest.raises(GroupLeft):
        works[0].wait()
    factory.close()
    with pytest.raises(GroupLeft):
        group.all_reduce(torch.ones(1))
    second = host.join("second", rank, size - 1)
    outcome["after"] = all_reduced(second.form(), 5)
    outcome["large after"] = all_reduced(second.form(), LARGE)[-1]
    return outcome


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_with_a_frozen_peer_is_left(collective: str) -> None:
    """The same processes then form a group without the peer."""
    with rendezvous() as (store, address), start_ranks(leave_frozen_peer, 3, address, collective) as ranks:
        wait_for_keys(store, "formed/0", "formed/1", "formed/2")
        ranks.kill(2, signal.SIGSTOP)
        store.set("go", "")
        wait_for_keys(store, "first/waits/0", "first/waits/1")
        assert all(process.is_alive() for process in ranks.processes), "they wait until they must leave"
        store.set("first/leave", "")
        for rank, outcome in enumerate(ranks.results(60.0, ranks=(0, 1))):
            assert outcome["pid"] == ranks.processes[rank].pid
            assert outcome["before"] == [6.0] * 3
            assert outcome["after"] == [3.0] * 5
            assert outcome["large after"] == 3.0


def wake_late(rank: int, size: int, _: str, address: Address) -> Any:
    """Leave a frozen peer. The peer itself, once awake, finds the connections closed."""
    host = GroupHost(address, rank)
    factory = host.join("first", rank, size)
    group = factory.form()
    host.store.set(f"formed/{rank}", "")
    wait_for_keys(host.store, "go")
    try:
        return all_reduced(group, LARGE)[0]
    except GroupLeft:
        factory.close()
    except RuntimeError as error:
        return is_communication_error(error)
    return all_reduced(host.join("second", rank, 2).form())


def test_a_peer_that_wakes_up_fails() -> None:
    with rendezvous() as (store, address), start_ranks(wake_late, 3, address) as ranks:
        wait_for_keys(store, "formed/0", "formed/1", "formed/2")
        ranks.kill(2, signal.SIGSTOP)
        store.set("go", "")
        wait_for_keys(store, "first/waits/0", "first/waits/1")
        store.set("first/leave", "")
        assert ranks.results(60.0, ranks=(0, 1)) == [[3.0] * 3] * 2
        store.delete_key("first/leave")
        ranks.kill(2, signal.SIGCONT)
        assert ranks.results(60.0, ranks=(2,)) == [True], "a communication error, and no sum of its own"


# --- killed peers


def lose_peer(rank: int, size: int, _: str, address: Address) -> dict[str, Any]:
    host = GroupHost(address, rank)
    factory = host.join("first", rank, size)
    group = factory.form()
    host.store.set(f"formed/{rank}", "")
    if rank == 1:
        time.sleep(600)
    outcome: dict[str, Any] = {}
    try:
        all_reduced(group, LARGE)
    except GroupLeft:
        outcome["error"] = "left"
    except RuntimeError as error:
        outcome["error"] = is_communication_error(error)
    host.membership.leave()
    factory.close()
    outcome["after"] = all_reduced(host.join("second", rank // 2, 2).form())
    return outcome


def test_a_killed_peer_is_noticed_without_leaving() -> None:
    """Its connections are closed."""
    with rendezvous() as (store, address), start_ranks(lose_peer, 3, address) as ranks:
        wait_for_keys(store, "formed/0", "formed/1", "formed/2", "first/waits/0", "first/waits/2")
        ranks.kill(1)
        first, _, third = ranks.results(60.0)
    assert first == third == {"error": True, "after": [3.0] * 3}


def lose_peer_while_forming(rank: int, size: int, _: str, address: Address) -> list[float]:
    """Rank 1 dies between publishing its address and answering the others."""
    host = GroupHost(address, rank)
    factory = host.join("first", rank, size)
    if rank == 1:

        def die() -> None:
            wait_for_keys(host.store, "die")
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    if rank == 2:
        wait_for_keys(host.store, "late")
    with pytest.raises((GroupLeft, RuntimeError)) as caught:
        all_reduced(factory.form(), LARGE)
    assert is_communication_error(caught.value), caught.value
    host.store.set(f"failed/{rank}", "")
    factory.close()
    return all_reduced(host.join("second", rank // 2, 2).form())


def test_a_peer_may_die_while_the_group_forms() -> None:
    with rendezvous() as (store, address), start_ranks(lose_peer_while_forming, 3, address) as ranks:
        wait_for_keys(store, "first/waits/0", "first/waits/1")
        ranks.expect_death(1)
        store.set("die", "")
        ranks.processes[1].join(30.0)
        store.set("late", "")
        # Their ports decide which rank connects to which: the last one is refused, or waits for a
        # connection.
        deadline = time.monotonic() + 60.0
        while not (store.check(["failed/2"]) or store.check(["first/waits/2"])):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        store.set("first/leave", "")
        first, _, third = ranks.results(60.0)
    assert first == third == [3.0] * 3


def lose_arrived_peer(rank: int, size: int, _: str, address: Address) -> dict[str, Any]:
    """Rank 1 dies between its arrival and the moment when it would publish its address."""
    host = GroupHost(address, rank)
    form = group_module._new_backend

    def connect(*arguments: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        host.store.set("connects", "")
        return form(*arguments)

    pytest.MonkeyPatch().setattr(group_module, "_new_backend", connect)
    gc.disable()
    files_before = count_files()
    factory = host.join("first", rank, size)
    with pytest.raises(GroupLeft):
        factory.form()
    factory.close()
    is_left = weakref.ref(factory)
    del factory
    return {
        "threads": wait_until_at_most(count_forming_threads, 0),
        "files": wait_until_at_most(count_files, files_before) - files_before,
        "collected": is_left() is None,
    }


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_futile_attempt_keeps_no_thread_and_no_file() -> None:
    """Not for a minute, as it would wait for the address of a peer, nor until garbage is collected."""
    with rendezvous() as (store, address), start_ranks(lose_arrived_peer, 2, address) as ranks:
        ranks.expect_death(1)
        ranks.processes[1].join(30.0)
        wait_for_keys(store, "connects")
        store.set("first/leave", "")
        first, *_ = ranks.results(30.0)
    assert first == {"threads": 0, "files": 0, "collected": True}


def reduce_with_late_connections(rank: int, size: int, _: str, address: Address) -> list[float]:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    group = GroupHost(address, rank).join("late", rank, size).form()
    gc.collect()
    return all_reduced(group)


def test_gloo_may_connect_in_the_first_collective() -> None:
    with rendezvous() as (_, address), start_ranks(reduce_with_late_connections, 2, address) as ranks:
        assert ranks.results(30.0) == [[3.0, 3.0, 3.0]] * 2


# --- peers that never arrive


def form_in_vain(
    rank: int,
    size: int,
    _: str,
    address: Address,
    num_attempts: int,
) -> dict[str, Any]:
    """Try to form groups with a rank that has ended, and then a group without it."""
    host = GroupHost(address, rank)
    if rank == size - 1:
        return {}
    for attempt in range(num_attempts):
        factory = host.join(f"vain-{attempt}", rank, size)
        with pytest.raises(GroupLeft):
            factory.form()
        factory.close()
    factory = host.join("second", rank, size - 1)
    after = all_reduced(factory.form())
    factory.close()
    return {"after": after, "threads": wait_until_at_most(count_forming_threads, 0)}


def count_forming_threads() -> int:
    return sum(thread.name == "forming" for thread in threading.enumerate())


@pytest.mark.parametrize("num_attempts", [1, 3])
def test_a_group_that_cannot_form_is_left(num_attempts: int) -> None:
    """No thread of a futile attempt stays behind."""
    with rendezvous() as (store, address), start_ranks(form_in_vain, 3, address, num_attempts) as ranks:
        for attempt in range(num_attempts):
            wait_for_keys(store, f"vain-{attempt}/waits/0", f"vain-{attempt}/waits/1")
            store.set(f"vain-{attempt}/leave", "")
        first, second, _ = ranks.results(60.0)
    assert first == second == {"after": [3.0] * 3, "threads": 0}
