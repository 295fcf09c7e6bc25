"""World's exchanges besides plain collectives, over real processes: values for the main worker, values that
some workers know, waits without a time limit; and leaving the group in the middle of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupLeft, GroupMembership
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world, recoverable_world

CPU = torch.device("cpu")


@contextmanager
def joined_world(rank: int, size: int, store_path: str, recoverable: bool) -> Iterator[World]:
    """The world of hosts that can leave their group, or of workers that cannot."""
    store = file_store(store_path, size)
    if recoverable:
        factory = GroupFactory(store, "generation0", rank, size, GroupMembership())
        with recoverable_world(factory, CPU, "gloo") as world:
            yield world
            world.barrier()
    else:
        with process_group_world(store, rank, size, CPU, "gloo", 60) as world:
            yield world


both_worlds = pytest.mark.parametrize("recoverable", [False, True], ids=["process_group", "recoverable"])


# --- shares of a batch


@given(st.integers(0, 100), st.integers(1, 9))
def test_a_batch_is_split_evenly_and_completely(count: int, size: int) -> None:
    parts = World(0, size, CPU).split_batch(count, micro_batch=1)
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 200), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6))
def test_a_batch_is_split_in_proportion_to_shares(count: int, shares: list[float]) -> None:
    world = World(0, len(shares), CPU).with_shares(shares)
    lengths = [part.stop - part.start for part in world.split_batch(count, micro_batch=1)]
    assert sum(lengths) == count
    for length, share in zip(lengths, shares, strict=True):
        assert abs(length - count * share / sum(shares)) <= 1.0 + 1e-9


# --- values posted to the main worker


def post_values(rank: int, size: int, store: str, recoverable: bool) -> list[Any]:
    """The last rank posts late: until then the main one receives nothing."""
    with joined_world(rank, size, store, recoverable) as world:
        received: list[Any] = []
        for name in ("first", "second"):
            if rank == 1:
                world.post(name, {"rank": rank, "none": None})
            world.barrier()
            if rank == 0:
                received.append(world.posted(name))
            world.barrier()
            if rank == 2:
                world.post(name, [name])
            world.barrier()
            if rank == 0:
                received += [world.posted(name), world.posted(name)]
        return received


@both_worlds
def test_the_main_worker_receives_what_all_have_posted_once(recoverable: bool) -> None:
    one = {"rank": 1, "none": None}
    received = [None, [one, ["first"]], None, None, [one, ["second"]], None]
    assert run_ranks(post_values, 3, recoverable) == [received, [], []]


# --- collectives


def run_collectives(rank: int, size: int, store: str, recoverable: bool) -> dict[str, Any]:
    with joined_world(rank, size, store, recoverable) as world:
        return {
            "max": world.all_reduce_max([rank, -rank]),
            "gather": world.gather_values([float(rank), 5.0]),
            "sum": world.all_reduce(torch.tensor([1.0, float(rank)])).tolist(),
        }


@both_worlds
def test_collectives_combine_the_values_of_all_ranks(recoverable: bool) -> None:
    expected = {"max": [2.0, 0.0], "gather": [[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]], "sum": [3.0, 3.0]}
    assert run_ranks(run_collectives, 3, recoverable) == [expected] * 3


def broadcast_expanded(rank: int, size: int, store: str) -> list[float]:
    with joined_world(rank, size, store, recoverable=False) as world:
        memory = torch.tensor([5.0, float(rank), float(rank), float(rank)])
        transposed = torch.full((2, 3), float(rank)).T
        world.broadcast([memory[:1].expand(3), memory[3:], transposed])
        return [*memory.tolist(), float(transposed.sum())]


def test_broadcasting_an_expanded_tensor_writes_nothing_else() -> None:
    assert run_ranks(broadcast_expanded, 2) == [[5.0, 0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 1.0, 0.0, 0.0]]


def wait_for_slow_main(rank: int, size: int, store: str) -> float:
    """The main worker takes longer than the timeout of a collective."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 3) as world:
        start = time.monotonic()
        if rank == 0:
            time.sleep(5)
        world.wait_for_main("late")
        return time.monotonic() - start


@pytest.mark.extended
def test_the_others_wait_for_the_main_worker_past_the_timeout() -> None:
    assert min(run_ranks(wait_for_slow_main, 2)) > 4.5


def wait_for_slow_last(rank: int, size: int, store: str) -> float:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 3) as world:
        start = time.monotonic()
        if rank == 2:
            time.sleep(5)
        world.wait_for_all("late")
        return time.monotonic() - start


def test_all_wait_for_any_worker_past_the_timeout() -> None:
    assert min(run_ranks(wait_for_slow_last, 3)) > 4.5


def receive_from_main(rank: int, size: int, store: str) -> list[Any]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        values = [{"folder": "x"}, None]
        return [world.wait_for_main(str(n), values[n] if rank == 0 else None) for n in range(2)]


def test_a_wait_for_the_main_worker_returns_its_value() -> None:
    assert run_ranks(receive_from_main, 3) == [[{"folder": "x"}, None]] * 3


# --- values that some workers know


def broadcast_values(rank: int, size: int, store: str, recoverable: bool) -> list[Any]:
    with joined_world(rank, size, store, recoverable) as world:
        values: list[Any] = [
            world.broadcast_value("main", {"a": [1, 2.5]} if rank == 0 else None),
            world.broadcast_value("last", "of two" if rank == 2 else None),
            world.broadcast_value("several", rank if rank else None),
            world.broadcast_value("nobody", None),
            world.broadcast_value("false", 0 if rank == 1 else None),
        ]
        world.wait_for_main("end")
        return values


@both_worlds
def test_a_value_comes_from_the_lowest_rank_that_has_one(recoverable: bool) -> None:
    assert run_ranks(broadcast_values, 3, recoverable) == [[{"a": [1, 2.5]}, "of two", 1, None, 0]] * 3


def gather_values(rank: int, size: int, store: str, recoverable: bool) -> list[list[Any]]:
    """Texts of several lengths, one of them not ASCII; infinity; a value that is None on some."""
    with joined_world(rank, size, store, recoverable) as world:
        return [
            world.gather_values([f"Gerät {'x' * rank}", float("inf") if rank == 1 else 2.5]),
            world.gather_values(None if rank else {"a": [1]}),
        ]


@both_worlds
def test_the_values_of_all_ranks_are_gathered_by_rank(recoverable: bool) -> None:
    texts = [["Gerät ", 2.5], ["Gerät x", float("inf")], ["Gerät xx", 2.5]]
    assert run_ranks(gather_values, 3, recoverable) == [[texts, [{"a": [1]}, None, None]]] * 3


def test_a_single_process_keeps_its_own_value() -> None:
    world = World.single_process()
    assert world.gather_values({"x": 1}) == [{"x": 1}]
    assert world.wait_for_main("anywhere", 5) == 5
    world.wait_for_all("anywhere")
    assert world.broadcast_value("x", 3) == 3
    assert world.broadcast_value("y", None) is None


# --- leaving the group

BLOCKING_CALLS: dict[str, Callable[[World], Any]] = {
    "wait_for_main": lambda world: world.wait_for_main("never"),
    "broadcast_value": lambda world: world.broadcast_value("never", None),
    "wait_for_all": lambda world: world.wait_for_all("never"),
    "all_reduce": lambda world: world.all_reduce(torch.ones(3)),
    "gather_values": lambda world: world.gather_values(1),
    "broadcast": lambda world: world.broadcast([torch.ones(3)]),
    "second axis": lambda world: [world.axis(name) for name in ("expert", "data")],
}


def leave_when_blocked(membership: GroupMembership) -> None:
    """Leave the group once five looks in a row have found this rank waiting."""
    looks = 0
    while looks < 5:
        time.sleep(0.01)
        looks = looks + 1 if membership.observe().waiting else 0
    membership.leave()


def leave_while_blocked(rank: int, size: int, store: str, call: str) -> tuple[bool, bool] | None:
    """The main rank takes no part in the call; the others leave while they wait for it."""
    membership = GroupMembership()
    done = file_store(f"{store}-done", size)
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, membership)
    with recoverable_world(factory, CPU, "gloo") as world:
        world.barrier()
        if world.is_main:
            done.wait(["1", "2"])
            return None
        threading.Thread(target=leave_when_blocked, args=(membership,), daemon=True).start()
        try:
            BLOCKING_CALLS[call](world)
        except GroupLeft as error:
            return membership.left, is_communication_error(error)
        finally:
            done.set(str(rank), "")
    raise AssertionError("the call returned though the main rank took no part")


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_a_blocked_call_ends_when_the_group_is_left(call: str) -> None:
    assert run_ranks(leave_while_blocked, 3, call, timeout=60.0) == [None, (True, True), (True, True)]


def withhold_value(rank: int, size: int, store: str) -> str:
    """Rank 1 announces a value and never publishes it."""
    membership = GroupMembership()
    done = file_store(f"{store}-done", size)
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, membership)
    with recoverable_world(factory, CPU, "gloo") as world:
        if rank == 1:
            world.all_reduce_max([-1.0])  # the first half of broadcast_value
            done.wait(["0"])
            return "withheld"
        threading.Thread(target=leave_when_blocked, args=(membership,), daemon=True).start()
        try:
            return str(world.broadcast_value("x", None))
        except GroupLeft:
            return "left"
        finally:
            done.set(str(rank), "")


def test_the_wait_for_a_value_that_is_never_published_can_be_left() -> None:
    assert run_ranks(withhold_value, 2) == ["left", "withheld"]


def join_two_generations(rank: int, size: int, store_path: str) -> list[Any]:
    """Use the same names in two generations of the group, over one store."""
    store = file_store(store_path, size)
    values: list[Any] = []
    for generation in range(2):
        factory = GroupFactory(store, f"generation{generation}", rank, size, GroupMembership())
        with recoverable_world(factory, CPU, "gloo") as world:
            values.append(world.broadcast_value("x", generation if rank == 1 else None))
            world.wait_for_main("end")
            assert world.axis("expert") is world.group
            own = world.axis("data")
            assert own is not world.group
            assert world.with_shares([1, 2]).axis("data") is own
            values.append(own.size)
            world.barrier()
    return values


def test_names_are_free_again_in_the_next_generation() -> None:
    assert run_ranks(join_two_generations, 2) == [[0, 2, 1, 2]] * 2


def test_a_foreign_value_counts_as_missing_until_the_right_one_comes() -> None:
    store = HashStore()
    for key in ("wait_for_main/x", "post/y/1"):
        store.set(key, "1 null")
    main, other = (World(rank, 2, CPU, store=store, secret="a secret") for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.wait_for_main, "x")
        assert main.posted("y") is None
        other.post("y", [1])
        assert main.posted("y") == [[1]]
        assert not waiting.done()
        main.wait_for_main("x", {"a": 1})
        assert waiting.result(timeout=60) == {"a": 1}


def broadcast_different_names(rank: int, size: int, store: str) -> str:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        try:
            return str(world.broadcast_value(f"name {rank}", rank))
        except RuntimeError as error:
            return str(error)


def test_workers_that_broadcast_different_values_are_told_apart() -> None:
    main, other = run_ranks(broadcast_different_names, 2)
    assert main == "0"
    assert "'name 1'" in other
    assert "'name 0'" in other


def test_a_group_that_cannot_be_left_has_a_membership_that_never_ends() -> None:
    membership = World.single_process().membership
    membership.wait_until(lambda: True)
    assert not membership.left
