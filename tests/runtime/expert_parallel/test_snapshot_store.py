"""Expert hosts as actors of a real Ray: what they put out is fetched in order, they leave while they wait, and copies of their state
outlive them. All in one cluster, with hosts that train nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from experts.actor_host import ExpertHost
from experts.membership import GroupLeft
from orchestrator.runtime.expert_parallel.calls import GroupCalls
from orchestrator.runtime.expert_parallel.snapshot_store import SnapshotStore
from orchestrator.runtime.ray_internals import reload_auth_mode
from tests.support.cluster import Cluster
from tests.support.idle_worker import LARGE, Told, working

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def here(shared_cluster: Cluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, shared_cluster.environment[name])
        reload_auth_mode()
        ray.init(address=shared_cluster.address, log_to_driver=False)
        yield
        ray.shutdown()
    reload_auth_mode()


@dataclass
class Seats:
    """Hosts by their seats, on nodes that the test makes up: only the first name is a node that answers."""

    nodes: tuple[str | None, ...]
    actors: dict[int, Any] = field(default_factory=dict)

    def start(self, *seats: int) -> None:
        for seat in seats:
            self.actors[seat] = ExpertHost.options(num_cpus=0, max_restarts=0).remote()  # pyright: ignore[reportAttributeAccessIssue]

    def actor(self, number: int) -> Any:
        return self.actors[number]

    def node(self, number: int) -> str | None:
        return self.nodes[number]

    def end(self, number: int, frozen: bool = False) -> None:
        actor = self.actors.pop(number, None)
        if actor is not None:
            ray.kill(actor)


def seats_here() -> Iterator[Seats]:
    made = Seats((str(ray.get_runtime_context().get_node_id()),) * 3)
    yield made
    for seat in list(made.actors):
        made.end(seat)


@pytest.fixture
def seats(here: None) -> Iterator[Seats]:
    yield from seats_here()


@pytest.fixture(scope="module")
def one(here: None) -> Iterator[Seats]:
    """A host that several tests share: each in epochs of its own, and leaves nothing behind."""
    for made in seats_here():
        made.start(0)
        yield made


def join(seats: Seats, epoch: int, *members: int) -> None:
    ray.get(
        [
            seats.actor(seat).join.remote(working, epoch, epoch, rank, len(members))
            for rank, seat in enumerate(members)
        ]
    )


def do(seats: Seats, what: str, number: int, *members: int) -> list[Any]:
    return ray.get([seats.actor(seat).advance.remote((what, number)) for seat in members])


def until(copies: SnapshotStore, there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not there():
        assert time.monotonic() < deadline
        copies.look()
        time.sleep(0.01)


def held(references: tuple[tuple[Any, Any], ...]) -> list[tuple[int, int]]:
    """Rank and bytes of each copy."""
    found: list[Any] = [(ray.get(header), ray.get(data)) for header, data in references]
    assert all(data.size == LARGE and (data == data[0]).all() for _, data in found)
    return [(header.rank, int(data[0])) for header, data in found]


def step_of(told: Any) -> int:
    header: Any = ray.get(told)
    return header.step


def gone(actor: Any) -> None:
    """Killed, and known to be."""
    ray.kill(actor)
    assert_gone(actor)


def assert_gone(actor: Any) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            ray.get(actor.leave.remote(0))
        except RayActorError:
            return
        time.sleep(0.02)
    pytest.fail("the host answers still")


def test_a_host_puts_out_two_and_waits_with_the_third(one: Seats) -> None:
    join(one, 0, 0)
    host = one.actor(0)
    first = host.copy.remote()  # asked for before there is any
    assert do(one, "put", 1, 0) == [1]
    assert do(one, "put", 2, 0) == [2], "while the first is fetched"
    third = host.advance.remote(("put", 3))
    assert ray.wait([third], timeout=0.5)[0] == [], "there is no room"
    second = host.copy.remote()
    assert ray.get(third) == 3
    last = host.copy.remote()
    assert [step_of(told) for told, _ in (first, second, last)] == [1, 2, 3]
    assert [int(ray.get(data)[-1]) for _, data in (first, second, last)] == [1, 2, 3]


def test_a_host_leaves_while_it_waits(one: Seats) -> None:
    host = one.actor(0)
    join(one, 4, 0)
    call = host.advance.remote(("wait", 0))
    ray.get(host.leave.remote(3))
    assert ray.wait([call], timeout=0.3)[0] == [], "of an epoch before: no concern of this one"
    ray.get(host.leave.remote(4))
    with pytest.raises(RayTaskError) as caught:
        ray.get(call)
    assert isinstance(caught.value.cause, GroupLeft)
    join(one, 5, 0)
    assert do(one, "go on", 7, 0) == [7], "in the same process, in a new life"


def test_a_host_leaves_while_it_waits_for_room(one: Seats) -> None:
    join(one, 10, 0)
    do(one, "put", 1, 0)
    call = one.actor(0).advance.remote(("put", 2))
    assert ray.wait([call], timeout=0.2)[0] == []
    ray.get(one.actor(0).leave.remote(10))
    with pytest.raises(RayTaskError):
        ray.get(call)
    fetched = one.actor(0).copy.remote()
    join(one, 11, 0)
    do(one, "put", 9, 0)
    assert step_of(fetched[0]) in (1, 9)


def test_who_was_told_to_leave_before_it_joined_does_not_wait(one: Seats) -> None:
    ray.get(one.actor(0).leave.remote(20))
    join(one, 20, 0)
    with pytest.raises(RayTaskError):
        do(one, "wait", 0, 0)
    join(one, 21, 0)
    call = one.actor(0).advance.remote(("wait", 0))
    assert ray.wait([call], timeout=0.2)[0] == []
    one.actor(0).leave.remote(21)


def test_a_new_life_begins_with_an_empty_outbox(one: Seats) -> None:
    join(one, 30, 0)
    do(one, "put", 1, 0)
    join(one, 31, 0)
    do(one, "put", 2, 0)
    assert ray.get(one.actor(0).copy.remote()[0]) == Told(31, 2, 0, 1)


def test_copies_outlive_their_hosts(seats: Seats) -> None:
    seats.start(0, 1)
    join(seats, 0, 0, 1)
    copies = SnapshotStore(seats, print)  # pyright: ignore[reportArgumentType]
    copies.follow(0, (1, 0))
    (main,) = copies.calls(all_of_them=False)
    assert (copies._asked[main][0], len(copies.calls(all_of_them=True))) == (1, 2), (
        "the first member's is waited for, or all"
    )
    copies.follow(0, (0, 1))
    assert (copies.step, copies.references()) == (-1, ())
    do(seats, "put", 1, 0, 1)
    until(copies, lambda: copies.step == 1)
    do(seats, "put", 2, 0)  # of the other there is none yet
    until(copies, lambda: bool(copies._coming))
    assert copies.step == 1, "a set that is not whole takes nobody's place"
    for seat in (0, 1):
        gone(seats.actor(seat))
    copies.look()
    assert held(copies.references()) == [(0, 1), (1, 11)]
    copies.forget()
    assert (copies.step, copies.references()) == (-1, ())


def test_copies_of_an_epoch_that_was_left_are_not_taken_for_new(seats: Seats) -> None:
    seats.start(0, 1, 2)
    copies = SnapshotStore(seats, print)  # pyright: ignore[reportArgumentType]
    join(seats, 0, 0, 1)
    copies.follow(0, (0, 1))
    do(seats, "put", 1, 0, 1)
    until(copies, lambda: copies.step == 1)
    do(seats, "put", 2, 0)
    seats.end(1)
    join(seats, 1, 0, 2)
    copies.follow(1, (0, 2))
    do(seats, "put", 3, 2)
    until(copies, lambda: 3 in copies._coming)
    assert copies.step == 1
    do(seats, "put", 3, 0)
    until(copies, lambda: copies.step == 3)
    assert held(copies.references()) == [(0, 3), (1, 13)]


def test_a_buddy_keeps_what_lies_on_a_node_that_is_gone(seats: Seats) -> None:
    """The second host's node does not answer: its copy comes from the first, who keeps it in its own memory."""
    seats.nodes = (seats.nodes[0], "a node that is gone")
    seats.start(0, 1)
    join(seats, 0, 0, 1)
    copies = SnapshotStore(seats, print)  # pyright: ignore[reportArgumentType]
    copies.follow(0, (0, 1))
    for step in (1, 2):
        do(seats, "put", step, 0, 1)
        until(copies, lambda step=step: copies.step == step)
    gone(seats.actor(1))
    references = copies.references()
    assert references[1] != copies._whole[1].refs[1], "not from where it was made"  # pyright: ignore[reportOptionalSubscript]
    assert held(references) == [(0, 2), (1, 12)]
    seats.end(0)
    assert copies.references() == (), "where the buddy is gone too there is none"


@ray.remote(num_cpus=0, max_retries=0)
def loses() -> None:
    """Fails as a second copy does whose first is lost."""
    raise ObjectLostError("00", None, "")


def test_a_set_stands_the_loss_of_a_keeper_but_not_of_a_first_copy(seats: Seats) -> None:
    seats.nodes = (seats.nodes[0], "another node")
    seats.start(0, 1)
    join(seats, 0, 0, 1)
    warnings: list[str] = []
    copies = SnapshotStore(seats, warnings.append)  # pyright: ignore[reportArgumentType]
    copies.follow(0, (0, 1))
    do(seats, "put", 1, 0, 1)
    until(copies, lambda: copies.step == 1)
    made = copies._whole[1]  # pyright: ignore[reportOptionalSubscript]
    assert made.buddies == {0: 1, 1: 0}
    made.acknowledged[1] = loses.remote()
    ray.wait([made.acknowledged[1]])
    assert copies._open(made)
    copies._coming = {2: made}
    copies._settle()
    assert copies.step == 1, "it never becomes whole: the set before it is kept"
    assert not copies.expects(2), "and it is not waited for"
    assert copies.expects(3)
    assert copies._coming == {}
    made.acknowledged[1] = seats.actor(0).kept.remote((9, 9, 9))[
        0
    ]  # fails, as a keeper does that has no room
    ray.wait([made.acknowledged[1]])
    assert not copies._open(made)
    assert (made.buddies, len(warnings)) == ({0: 1}, 1)
    gone(seats.actor(1))
    made.acknowledged[0] = seats.actor(1).keep.remote((0, 0, 1), *made.refs[0], 0)
    ray.wait([made.acknowledged[0]])
    assert not copies._open(made)
    assert (made.buddies, len(warnings)) == ({}, 1), "that a host is lost is told otherwise"
    until(
        copies, lambda: copies.gone == {1}
    )  # that its host is dead is known though nobody asked it anything
    copies.follow(1, (0,))
    assert copies.gone == set()


def test_a_buddy_lets_go_of_what_is_old(one: Seats) -> None:
    host, data = one.actor(0), np.zeros(LARGE, np.uint8)
    for step in (10, 20, 30):
        ray.get(host.keep.remote((0, 1, step), f"header {step}", data + step, step - 10))
    assert ray.get(host.kept.remote((0, 1, 30))[0]) == "header 30"
    assert int(ray.get(host.kept.remote((0, 1, 20))[1])[0]) == 20, (
        "the one before is there until the next is acknowledged"
    )
    with pytest.raises(RayTaskError):
        ray.get(host.kept.remote((0, 1, 10))[0])


def test_who_has_answered_who_has_failed_and_who_is_lost(seats: Seats) -> None:
    seats.start(0, 1, 2)
    join(seats, 0, 2, 0, 1)
    muster = GroupCalls(seats)  # pyright: ignore[reportArgumentType]
    muster.form((2, 0, 1))
    wishes = {2: ("go on", 5), 0: ("fail", 0), 1: ("wait", 0)}
    muster.ask(lambda actor, seat, rank: actor.advance.remote(wishes[seat]))
    ray.wait(list(muster.calls), num_returns=2)
    muster.hear()
    assert (muster.first, muster.rank(1), muster.broken) == (5, 2, True)
    assert isinstance(muster.raised[0], ValueError)
    assert (list(muster.calls.values()), muster.lost) == ([1], {})
    gone(seats.actor(1))
    ray.wait(list(muster.calls))
    muster.hear()
    assert muster.lost == {1: "host 2 was lost"}
    assert not muster.calls
    muster.form((2,))
    assert not muster.broken
    muster.ask(lambda actor, seat, rank: actor.advance.remote(("wait", 0)))
    actor = seats.actor(2)
    muster.give_up(2, "host 0 was stuck")
    assert (muster.calls, muster.lost) == ({}, {2: "host 0 was stuck"}), (
        "who does not answer is ended, and not waited for"
    )
    assert_gone(actor)
