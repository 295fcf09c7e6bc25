"""What workers say to each other beside their collectives: tensors to the main one, values that some know, and meetings; over real
processes, and left when someone says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.group import GroupFactory
from experts.membership import GroupLeft, GroupMembership
from orchestrator.train.parts import world as module
from orchestrator.train.parts.world import (
    World,
    file_store,
    is_communication_error,
    process_group_world,
    recoverable_world,
)
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@contextmanager
def member(
    rank: int, size: int, store: str, lodges: bool, life: GroupMembership | None = None
) -> Iterator[World]:
    """The world of hosts that can leave, or of workers that cannot."""
    made = file_store(store, size)
    if lodges:
        with recoverable_world(
            GroupFactory(made, "epoch0", rank, size, life or GroupMembership()), CPU, "gloo"
        ) as world:
            yield world
            world.barrier()
    else:
        with process_group_world(made, rank, size, CPU, "gloo", 60) as world:
            yield world


def own(rank: int) -> dict[str, Tensor]:
    """Tensors of one rank: of other number, sizes and kinds on each; rank 2 has none but empty ones."""
    draw = torch.Generator().manual_seed(rank)
    if rank == 2:
        return {"empty": torch.empty(0, 4), "none": torch.empty(3, 0, dtype=torch.int64)}
    return {
        "odd": torch.randn(7, 3, generator=draw),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.25 * rank, dtype=torch.float64),
        "half": torch.randn(5, generator=draw).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(6, 5, generator=draw).t(),
        "large": torch.randint(0, 99, (101,), generator=draw),
    }


def sends(rank: int, size: int, store: str, lodges: bool, piece: int) -> list[tuple[dict[str, Tensor], Any]]:
    module._PIECE_BYTES = piece  # in a process of its own
    with member(rank, size, store, lodges) as world:
        first = world.gather_to_main(own(rank), {"rank": rank, "none": None}, "first")
        again = world.gather_to_main({} if rank == 1 else {"x": torch.full((3,), rank)}, None, "again")
        return first + again


@pytest.mark.parametrize("lodges", [False, True], ids=["joined", "lodged"])
@pytest.mark.parametrize("piece", [7, 64, 2**26])
def test_tensors_to_the_main_worker(lodges: bool, piece: int) -> None:
    main, *others = run_ranks(sends, 3, lodges, piece)
    assert others == [[], []], "nobody else gets any"
    for rank, (tensors, plain) in enumerate(main[:2], start=1):
        assert plain == {"rank": rank, "none": None}
        assert list(tensors) == list(own(rank))
        for name, tensor in own(rank).items():
            assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(tensors[name], tensor), name
    assert main[2] == ({}, None)
    assert main[3][0]["x"].tolist() == [2, 2, 2]


def test_one_process_sends_nothing() -> None:
    assert World.single_process().gather_to_main({"x": torch.ones(1)}, 1, "x") == []


def agrees(rank: int, size: int, store: str, lodges: bool) -> list[Any]:
    with member(rank, size, store, lodges) as world:
        known: list[Any] = [
            world.broadcast_value("main", {"a": [1, 2.5]} if rank == 0 else None),
            world.broadcast_value("last", "of two" if rank == 2 else None),
            world.broadcast_value("several", rank if rank else None),
            world.broadcast_value("nobody", None),
            world.broadcast_value("false", 0 if rank == 1 else None),
        ]
        world.wait_for_main("here")
        return known


@pytest.mark.parametrize("lodges", [False, True], ids=["joined", "lodged"])
def test_a_value_that_some_know(lodges: bool) -> None:
    assert run_ranks(agrees, 3, lodges) == [[{"a": [1, 2.5]}, "of two", 1, None, 0]] * 3


def test_one_process_agrees_with_itself() -> None:
    alone = World.single_process()
    alone.wait_for_main("anywhere")
    assert alone.broadcast_value("x", 3) == 3
    assert alone.broadcast_value("y", None) is None


WAYS: dict[str, Callable[[World], Any]] = {
    "meet": lambda world: world.wait_for_main("never"),
    "agree": lambda world: world.broadcast_value("never", None),
    "to_main": lambda world: world.gather_to_main({"x": torch.ones(3)}, None, "never"),
    "sum": lambda world: world.all_reduce(torch.ones(3)),
    "broadcast": lambda world: world.broadcast([torch.ones(3)]),
    "another": lambda world: world.new_group(),
}


def waits_in_vain(rank: int, size: int, store: str, way: str) -> tuple[bool, bool] | None:
    """The main one does not come; the others are told to leave while they wait."""
    life, over = GroupMembership(), file_store(f"{store}-over", size)
    with recoverable_world(
        GroupFactory(file_store(store, size), "epoch0", rank, size, life), CPU, "gloo"
    ) as world:
        world.barrier()
        if world.is_main:
            over.wait(["1", "2"])
            return None
        threading.Thread(target=leave_when_it_waits, args=(life,), daemon=True).start()
        try:
            WAYS[way](world)
        except GroupLeft as error:
            return life.left, is_communication_error(error)
        finally:
            over.set(str(rank), "")
    raise AssertionError("nobody was there, and yet it came back")


def leave_when_it_waits(life: GroupMembership) -> None:
    looks = 0
    while looks < 5:
        time.sleep(0.01)
        looks = looks + 1 if life.waiting else 0
    life.leave()


@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_leaves_when_told(way: str) -> None:
    assert run_ranks(waits_in_vain, 3, way, timeout=60.0) == [None, (True, True), (True, True)]


def half_agreed(rank: int, size: int, store: str) -> str:
    """Who knows the value is there, and does not come to say it."""
    life, over = GroupMembership(), file_store(f"{store}-over", size)
    with recoverable_world(
        GroupFactory(file_store(store, size), "epoch0", rank, size, life), CPU, "gloo"
    ) as world:
        if rank == 1:
            world.all_reduce_max([-1.0])  # its part of the first half
            over.wait(["0"])
            return "did not say"
        threading.Thread(target=leave_when_it_waits, args=(life,), daemon=True).start()
        try:
            return str(world.broadcast_value("x", None))
        except GroupLeft:
            return "left"
        finally:
            over.set(str(rank), "")


def test_a_value_that_is_never_told_is_not_waited_for_for_ever() -> None:
    assert run_ranks(half_agreed, 2) == ["left", "did not say"]


def two_lives(rank: int, size: int, store: str) -> list[Any]:
    """The same names mean other things in another life."""
    made, found = file_store(store, size), []
    for epoch in range(2):
        with recoverable_world(
            GroupFactory(made, f"epoch{epoch}", rank, size, GroupMembership()), CPU, "gloo"
        ) as world:
            found.append(world.broadcast_value("x", epoch if rank == 1 else None))
            world.wait_for_main("here")
            found.append(world.new_group().size)
            world.barrier()
    return found


def test_one_life_after_another() -> None:
    assert run_ranks(two_lives, 2) == [[0, 2, 1, 2]] * 2


def test_a_group_that_cannot_be_left_has_a_life_nobody_ends() -> None:
    life = World.single_process().membership
    life.until(lambda: True)
    assert not life.left
