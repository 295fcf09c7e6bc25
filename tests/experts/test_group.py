"""Groups that can be left, in real processes: with a peer that is frozen, killed or never comes; by the dozen; and each collective
against torch's own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import experts.group as module
from experts.group import Group, GroupFactory
from experts.membership import GroupLeft, GroupMembership
from orchestrator.train.parts.comm_errors import is_communication_error
from orchestrator.train.parts.stores import open_store, tcp_store
from tests.support.ranks import gloo, run_ranks, start_ranks

Place = tuple[str, int]
NUMBER = 300_000  # elements: more than sockets hold


@contextmanager
def meeting_place() -> Iterator[tuple[Any, Place]]:
    """A store that the test keeps, as the driver does for its hosts."""
    store, place = open_store("127.0.0.1")
    yield store, place


def seen(store: Any, *keys: str) -> None:
    """Wait until all of these were set."""
    deadline = time.monotonic() + 60.0
    while not store.check(list(keys)):
        assert time.monotonic() < deadline, (
            f"{keys} were not set: {[key for key in keys if not store.check([key])]}"
        )
        time.sleep(0.005)


class Host:
    """A rank that is told from outside when to leave, and tells when it waits."""

    def __init__(self, place: Place, rank: int) -> None:
        self.store, self._beside, self._place = (*(tcp_store(*place, 1, False, 60) for _ in range(2)), place)
        self.rank, self.life = rank, GroupMembership()

    def join(self, name: str, rank: int, size: int, anew: bool = False) -> GroupFactory:
        """``anew``: with another way to the store, for a peer that dies while they connect keeps the one it has busy for a minute."""
        self.life = GroupMembership()
        threading.Thread(target=self._watch, args=(name, self.life), daemon=True).start()
        return GroupFactory(
            tcp_store(*self._place, 1, False, 60) if anew else self.store, name, rank, size, self.life
        )

    def _watch(self, name: str, life: GroupMembership) -> None:
        looks = 0
        while not life.left:
            time.sleep(0.01)
            looks = looks + 1 if life.waiting else 0
            if looks == 10:
                self._beside.set(f"{name}/waits/{self.rank}", "")
            if self._beside.check([f"{name}/leave"]):
                life.leave()


def summed(group: Group, number: int = 3) -> list[float]:
    value = torch.full((number,), float(group.rank + 1))
    group.all_reduce(value).wait()
    return value.tolist()


COLLECTIVES: dict[str, Callable[[Group], Any]] = {
    "sum": lambda group: group.all_reduce(torch.ones(NUMBER)),
    "largest": lambda group: group.all_reduce_max(torch.ones(NUMBER)),
    "exchange": lambda group: group.all_to_all(
        torch.empty(NUMBER * 3), torch.ones(NUMBER * 3), [NUMBER] * group.size, [NUMBER] * group.size
    ),
}


def hangs_and_leaves(rank: int, size: int, _: str, place: Place, what: str) -> dict[str, Any]:
    """Two groups are formed; the last rank stands still from then on."""
    host = Host(place, rank)
    lines = host.join("first", rank, size)
    group, other = lines.form(), lines.form()
    before = summed(group)
    host.store.set(f"formed/{rank}", "")
    seen(host.store, "go")
    if rank == size - 1:
        time.sleep(600)
    works = [COLLECTIVES[what](group), other.all_reduce(torch.ones(NUMBER))]  # two under way at once
    found: dict[str, Any] = {"before": before, "pid": os.getpid()}
    try:
        works[0].wait()
    except GroupLeft:
        found["left"] = True
    lines.close()
    try:
        group.all_reduce(torch.ones(1))
    except GroupLeft:
        found["closed"] = True
    again = host.join("second", rank, size - 1)
    found["after"] = summed(again.form(), 5)
    found["other after"] = summed(again.form(), NUMBER)[-1]
    return found


@pytest.mark.parametrize("what", COLLECTIVES)
def test_a_group_is_left_while_a_peer_is_frozen(what: str) -> None:
    with meeting_place() as (store, place), start_ranks(hangs_and_leaves, 3, place, what) as ranks:
        seen(store, "formed/0", "formed/1", "formed/2")
        ranks.kill(2, signal.SIGSTOP)
        store.set("go", "")
        seen(store, "first/waits/0", "first/waits/1")
        assert all(process.is_alive() for process in ranks.processes), (
            "they wait: nobody has told them to leave"
        )
        store.set("first/leave", "")
        for rank, found in enumerate(ranks.results(60.0, ranks=(0, 1))):
            assert found["pid"] == ranks.processes[rank].pid
            assert found["before"] == [6.0] * 3
            assert found["left"]
            assert found["closed"], "who has left says no more in that group"
            assert found["after"] == [3.0] * 5
            assert found["other after"] == 3.0


def wakes_late(rank: int, size: int, _: str, place: Place) -> Any:
    """As above; whoever was frozen is told to leave too when it wakes, and finds the others gone."""
    host = Host(place, rank)
    lines = host.join("first", rank, size)
    group = lines.form()
    host.store.set(f"formed/{rank}", "")
    seen(host.store, "go")
    try:
        return summed(group, NUMBER)[0]
    except GroupLeft:
        lines.close()
    except RuntimeError as error:
        return is_communication_error(error)
    return summed(host.join("second", rank, 2).form())


def test_who_wakes_up_finds_the_others_gone() -> None:
    with meeting_place() as (store, place), start_ranks(wakes_late, 3, place) as ranks:
        seen(store, "formed/0", "formed/1", "formed/2")
        ranks.kill(2, signal.SIGSTOP)
        store.set("go", "")
        seen(store, "first/waits/0", "first/waits/1")
        store.set("first/leave", "")
        assert ranks.results(60.0, ranks=(0, 1)) == [[3.0] * 3] * 2
        store.delete_key("first/leave")
        ranks.kill(2, signal.SIGCONT)
        assert ranks.results(60.0, ranks=(2,)) == [True], (
            "it has lost touch, and does not sum what is none of its own"
        )


def loses_a_peer(rank: int, size: int, _: str, place: Place) -> dict[str, Any]:
    host = Host(place, rank)
    lines = host.join("first", rank, size)
    group = lines.form()
    host.store.set(f"formed/{rank}", "")
    if rank == 1:
        time.sleep(600)
    found: dict[str, Any] = {}
    try:
        summed(group, NUMBER)
    except GroupLeft:
        found["error"] = "left"
    except RuntimeError as error:
        found["error"] = is_communication_error(error)
    host.life.leave()
    lines.close()
    found["after"] = summed(host.join("second", rank // 2, 2).form())
    return found


def test_a_killed_peer_is_noticed_by_its_silence() -> None:
    """Nobody has to be told: the connection is gone."""
    with meeting_place() as (store, place), start_ranks(loses_a_peer, 3, place) as ranks:
        seen(store, "formed/0", "formed/1", "formed/2", "first/waits/0", "first/waits/2")
        ranks.kill(1)
        first, _, third = ranks.results(60.0)
    assert first == third == {"error": True, "after": [3.0] * 3}


def forms_in_vain(rank: int, size: int, _: str, place: Place, lives: int) -> dict[str, Any]:
    """The last rank is gone before the group is formed, life after life."""
    host = Host(place, rank)
    if rank == size - 1:
        return {}
    for life in range(lives):
        lines = host.join(f"vain-{life}", rank, size)
        with pytest.raises(GroupLeft):
            lines.form()
        lines.close()
    lines = host.join("second", rank, size - 1)
    after = summed(lines.form())
    lines.close()
    return {
        "after": after,
        "forming": settled(lambda: sum(thread.name == "forming" for thread in threading.enumerate()), 0),
    }


def settled(count: Callable[[], int], wanted: int) -> int:
    """A count, once it is as it should be, or has had the time."""
    deadline = time.monotonic() + 3.0
    while count() > wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return count()


def left_while_forming(lives: int) -> list[dict[str, Any]]:
    with meeting_place() as (store, place), start_ranks(forms_in_vain, 3, place, lives) as ranks:
        for life in range(lives):
            seen(store, f"vain-{life}/waits/0", f"vain-{life}/waits/1")
            store.set(f"vain-{life}/leave", "")
        return ranks.results(60.0)[:2]


def test_a_group_that_never_formed_is_left() -> None:
    for found in left_while_forming(1):
        assert found["after"] == [3.0] * 3


def test_what_formed_in_vain_is_let_go_of() -> None:
    assert [found["forming"] for found in left_while_forming(3)] == [0, 0]


def waits_for_long(rank: int, size: int, _: str, place: Place) -> list[float]:
    """Longer than the hosts have to connect."""
    module._CONNECT_TIMEOUT = timedelta(seconds=1)
    host = Host(place, rank)
    lines = host.join("only", rank, size)
    group = lines.form()
    if rank == 1:
        time.sleep(2.5)
    found = summed(group, NUMBER)[:2]
    lines.close()
    return found


def test_a_group_that_stands_waits_for_as_long_as_it_takes() -> None:
    with meeting_place() as (_, place):
        assert run_ranks(waits_for_long, 2, place) == [[3.0, 3.0]] * 2


def dies_while_forming(rank: int, size: int, _: str, place: Place) -> list[float]:
    """Rank 1 dies between telling the others where it is and answering them."""
    host = Host(place, rank)
    lines = host.join("first", rank, size, anew=True)
    if rank == 1:
        threading.Thread(
            target=lambda: (seen(host.store, "die"), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()
    if rank == 2:
        seen(host.store, "late")
    with pytest.raises((GroupLeft, RuntimeError)) as caught:
        summed(lines.form(), NUMBER)
    assert is_communication_error(caught.value), caught.value
    host.store.set(f"failed/{rank}", "")
    lines.close()
    return summed(host.join("second", rank // 2, 2).form())


def test_a_peer_that_dies_while_the_group_forms() -> None:
    with meeting_place() as (store, place), start_ranks(dies_while_forming, 3, place) as ranks:
        seen(store, "first/waits/0", "first/waits/1")
        ranks._killed.add(1)
        store.set("die", "")
        ranks.processes[1].join(30.0)
        store.set("late", "")
        deadline = (
            time.monotonic() + 60.0
        )  # it depends on their ports who calls whom: it is refused, or waits to be called
        while not (store.check(["failed/2"]) or store.check(["first/waits/2"])):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        store.set("first/leave", "")
        first, _, third = ranks.results(60.0)
    assert first == third == [3.0] * 3


def lives_on(rank: int, size: int, _: str, place: Place, lives: int, left: bool) -> list[tuple[int, int]]:
    """One life after another: files and threads after each. ``left``: with something under way that never ends."""
    host, counts = Host(place, rank), []
    for life in range(lives):
        lines = host.join(f"life-{life}", rank, size)
        groups = [lines.form(), lines.form()]
        assert summed(groups[life % 2]) == [6.0] * 3
        host.store.set(f"done/{life}/{rank}", "")
        seen(host.store, *(f"done/{life}/{other}" for other in range(size)))
        if left and rank != life % size:
            work = groups[0].all_reduce(torch.ones(NUMBER))
            host.life.leave()
            with pytest.raises((GroupLeft, RuntimeError)):
                work.wait()
            del work
        host.life.leave()
        lines.close()
        del groups, lines
        threads = settled(
            lambda: sum(thread.name in ("forming", "leaving") for thread in threading.enumerate()), 0
        )
        counts.append((settled(open_files, min((files for files, _ in counts), default=10**6)), threads))
    return counts


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("left", [False, True], ids=["closed", "left"])
def test_files_and_threads_do_not_grow_with_the_lives(left: bool) -> None:
    with meeting_place() as (_, place):
        for counts in run_ranks(lives_on, 3, place, 20, left, timeout=100.0):
            files, threads = [count[0] for count in counts], [count[1] for count in counts]
            assert files[-1] <= max(files[:4]), files
            assert max(threads) == 0, threads


def collectives(rank: int, size: int, store_path: str, place: Place) -> list[bool]:
    """Each collective of a group that can be left, of torch's group in our form, and of torch itself."""
    generator = torch.Generator().manual_seed(rank)
    host = Host(place, rank)
    lines = host.join("only", rank, size)
    equal = []
    with gloo(rank, size, store_path):
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        for group in (lines.form(), Group(rank, size, dist.group.WORLD)):
            for dtype in (torch.float64, torch.float32, torch.int64, torch.uint8):
                equal += [
                    torch.equal(*both)
                    for both in pairs(group, torch.randint(0, 9, (7, 2), generator=generator).to(dtype))
                ]
    lines.close()
    return equal


def pairs(group: Group, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rank, size = group.rank, group.size
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
    sends = [[0, 3, 4], [7, 0, 0], [2, 2, 3]]  # rows from each to each: none among them
    receives = [row[rank] for row in sends]
    ours, theirs = (torch.zeros(sum(receives), 2, dtype=tensor.dtype) for _ in range(2))
    group.all_to_all(ours, tensor, receives, sends[rank]).wait()
    dist.all_to_all_single(theirs, tensor, receives, sends[rank])
    assert size == 3
    yield ours, theirs


def test_the_collectives_are_torchs_own() -> None:
    with meeting_place() as (_, place):
        for equal in run_ranks(collectives, 3, place):
            assert equal == [True] * 32


def alone(rank: int, size: int, _: str, place: Place) -> list[Any]:
    host = Host(place, rank)
    lines = host.join("alone", rank, size)
    found = summed(lines.form())
    found.append(float(host.life.completed_waits))
    lines.close()
    return [*found, host.life.waiting]


def test_a_group_of_one() -> None:
    with meeting_place() as (_, place):
        assert run_ranks(alone, 1, place) == [[1.0, 1.0, 1.0, 3.0, False]], (
            "all there, formed, and summed: three answers"
        )


# Membership


def test_who_has_left_does_not_wait() -> None:
    life = GroupMembership()
    life.check()
    life.leave()
    assert life.left
    with pytest.raises(GroupLeft):
        life.check()
    with pytest.raises(GroupLeft):
        life.wait_until(lambda: False)


def test_what_is_there_already_is_taken_by_who_has_left() -> None:
    life = GroupMembership()
    life.leave()
    life.wait_until(lambda: True)
    assert (life.completed_waits, life.waiting) == (1, False)


def test_an_onlooker_sees_who_waits() -> None:
    life, there, waited = GroupMembership(), threading.Event(), []
    thread = threading.Thread(
        target=lambda: life.wait_until(lambda: bool(waited.append(life.waiting)) or there.is_set())
    )
    thread.start()
    while not waited:
        time.sleep(0.001)
    assert life.waiting
    assert life.completed_waits == 0
    there.set()
    thread.join()
    assert (life.waiting, life.completed_waits) == (False, 1)


def test_from_another_thread_it_is_left_at_once() -> None:
    life, caught = GroupMembership(), []

    def wait() -> None:
        try:
            life.wait_until(lambda: False)
        except GroupLeft as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    life.leave()
    thread.join(30.0)
    assert len(caught) == 1


@pytest.mark.parametrize("left", [True, False], ids=["left", "closed"])
def test_what_a_device_waits_for_is_aborted_when_the_group_is_left_or_closed(left: bool) -> None:
    life, over, aborted = GroupMembership(), threading.Event(), threading.Event()
    handle = SimpleNamespace(abort=aborted.set)
    thread = threading.Thread(target=module._abort_when_left, args=(handle, life, over))
    thread.start()
    assert not aborted.wait(0.3)
    if left:
        life.leave()
    else:
        over.set()
    thread.join(30.0)
    assert aborted.is_set()
