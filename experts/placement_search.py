"""The search behind ``placement``, over plain numbers: heaviest first and descent from the slowest host; and branch and bound,
which proves what it finds where it ends."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, groupby, islice
from operator import truediv

PROVEN = 1 + 1e-9  # this near the lower bound no assignment is better
CLOSE = 1 + 5e-4  # ... and this near it none is better by more than the speeds are known
_GROUP_TRIES = 300  # hosts tried for an expert by the search over two or three hosts, of which there are many
_DESCENT_TRIES = 100_000  # pairs of an expert and another host that the descents look at together
_NEAR = 16  # hosts done first, which are looked at before all others
_NEAREST = 6  # ... and two at a time
_NOTHING = (0.0, -1)  # what comes back for an expert that moves
_KINDS_TO_DOUBLE = 32  # of speeds that are taken together, from one speed to twice it
_BELOW = 1 - 1e-12  # of a bound: below what rounding makes of it
_Key = tuple[
    float, float, int
]  # when a host would be done, how many it holds (the other way round without work), which it is


@dataclass(frozen=True)
class Task:
    """Work in whole units, the room that is left on each host, and a lower bound of the slowest host's time."""

    work: list[float]
    bytes: list[float]
    speed: list[float]
    room: list[float]
    bound: float


def lower_bound(work: Sequence[float], speed: Sequence[float]) -> float:
    """Of all work over all hosts, and of the few heaviest experts over as many of the fastest hosts, the longest time."""
    total = math.fsum(work) / math.fsum(speed)
    heaviest, fastest = accumulate(sorted(work, reverse=True)), accumulate(sorted(speed, reverse=True))
    return max([total, *(most / best for most, best in zip(heaviest, fastest, strict=False))])


def overfull(host_of: Sequence[int], task: Task) -> tuple[int, float] | None:
    """The first host that would hold more than it has room for, and how much that is."""
    needed = [0.0] * len(task.room)
    for size, host in zip(task.bytes, host_of, strict=True):
        needed[host] += size
    return next(((host, most) for host, most in enumerate(needed) if most > task.room[host]), None)


# --- the heuristic


class _State:
    """A whole assignment: per host its load, its free memory and its experts, lightest first; and the hosts by their time."""

    def __init__(self, task: Task, host_of: Sequence[int]) -> None:
        self.task = task
        self.host_of = list(host_of)
        self.load = [0.0] * len(task.speed)
        self.free = list(task.room)
        self.held: list[list[tuple[float, int]]] = [[] for _ in task.speed]
        for expert, host in enumerate(host_of):
            self._put(expert, host)
        self.ranked = sorted(zip(map(truediv, self.load, task.speed), range(len(task.speed)), strict=True))

    def _put(self, expert: int, host: int) -> None:
        work = self.task.work[expert]
        self.host_of[expert] = host
        self.load[host] += work
        self.free[host] -= self.task.bytes[expert]
        insort(self.held[host], (work, expert))

    def move(self, expert: int, host: int) -> None:
        work, before = self.task.work[expert], self.host_of[expert]
        for each in (before, host):
            del self.ranked[bisect_left(self.ranked, (self.time(each), each))]
        self.held[before].remove((work, expert))
        self.load[before] -= work
        self.free[before] += self.task.bytes[expert]
        self._put(expert, host)
        for each in (before, host):
            insort(self.ranked, (self.time(each), each))

    def time(self, host: int) -> float:
        return self.load[host] / self.task.speed[host]

    @property
    def slowest(self) -> float:
        return self.ranked[-1][0]


def heuristic(task: Task) -> tuple[list[int] | None, float]:
    """The best assignment found and its slowest host's time in units; none and infinity if memory stood in the way."""
    best, limit, tries = None, math.inf, _DESCENT_TRIES
    for host_of in _starts(task):
        state = _State(task, host_of)
        tries = _descend(state, tries if limit > task.bound * CLOSE else 0)
        if state.slowest < limit:
            best, limit = state.host_of, state.slowest
    return best, limit


def _starts(task: Task) -> Iterator[list[int]]:
    """By work, by size where memory is limited, and round robin, so that nothing found is worse than that."""
    experts = range(len(task.work))
    by_work = sorted(experts, key=lambda e: (-task.work[e], -task.bytes[e]))
    by_size = sorted(experts, key=lambda e: (-task.bytes[e], -task.work[e]))
    limited = min(task.room) < math.inf
    found = [
        greedy(task, order)
        for order in ((by_work, by_size) if limited and by_size != by_work else (by_work,))
    ]
    yield from (host_of for host_of in found if host_of is not None)
    turns = [expert % len(task.speed) for expert in experts]
    if overfull(turns, task) is None:
        yield turns


def greedy(task: Task, order: Sequence[int]) -> list[int] | None:
    """Each expert, in this order, to the host that would be done with it first; without work, to the one with the fewest.
    None where memory stands in the way. Hosts wait in queues of about one speed, so few are looked at for each expert."""
    filling = _Filling(task)
    kinds = _kinds(task.speed)
    for block in _blocks(task, order):
        queues = _queues(filling, kinds, block)
        for expert in block:
            host = _first_done(filling, queues, expert)
            if host is None:
                return None
    return filling.host_of


class _Filling:
    """What each host has taken on so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.host_of = [0] * len(task.work)
        self.load, self.free, self.held = [0.0] * len(task.speed), list(task.room), [0] * len(task.speed)

    def key(self, host: int, work: float) -> _Key:
        """Orders hosts by when they would be done with so much more; by the number they hold where it is no work."""
        time = (self.load[host] + work) / self.task.speed[host]
        return (time, self.held[host], host) if work else (self.held[host], time, host)

    def give(self, expert: int, host: int) -> None:
        self.host_of[expert] = host
        self.load[host] += self.task.work[expert]
        self.free[host] -= self.task.bytes[expert]
        self.held[host] += 1


@dataclass(frozen=True)
class _Queue:
    """Hosts in the order in which they would be done with ``lightest``, the least work of a block. ``even``: of one speed, so it
    is their order for any other work too; else none gains more on the others than at the speed of the ``fastest``."""

    heap: list[_Key]
    lightest: float
    smallest: float
    fastest: float
    even: bool

    def may_beat(self, best: _Key, filling: _Filling, work: float) -> bool:
        if self.even:
            return filling.key(self.heap[0][-1], work) < best
        return self.heap[0][0] + (work - self.lightest) / self.fastest * _BELOW <= best[0]

    def back(self, hosts: Iterable[int], filling: _Filling) -> None:
        """What was looked at waits again, but for hosts that no expert of the block fits on any more."""
        for host in hosts:
            if filling.free[host] >= self.smallest:
                heappush(self.heap, filling.key(host, self.lightest))


def _kinds(speed: Sequence[float]) -> list[list[int]]:
    """The hosts by speed: one that many share makes a kind of its own, the others go by what is about the same."""
    many, count = math.sqrt(len(speed)), Counter(speed)
    kinds: dict[tuple[bool, float], list[int]] = {}
    for host, each in enumerate(speed):
        about = (
            (True, each) if count[each] >= many else (False, math.floor(_KINDS_TO_DOUBLE * math.log2(each)))
        )
        kinds.setdefault(about, []).append(host)
    return list(kinds.values())


def _queues(filling: _Filling, kinds: list[list[int]], block: Sequence[int]) -> list[_Queue]:
    task = filling.task
    lightest, smallest = (
        min(task.work[expert] for expert in block),
        min(task.bytes[expert] for expert in block),
    )
    queues = []
    for hosts in kinds if lightest else [[*range(len(task.speed))]]:
        heap = [filling.key(host, lightest) for host in hosts if filling.free[host] >= smallest]
        heapify(heap)
        speeds = [task.speed[host] for host in hosts]
        queues.append(
            _Queue(heap, lightest, smallest, max(speeds), even=not lightest or min(speeds) == max(speeds))
        )
    return queues


def _first_done(filling: _Filling, queues: Sequence[_Queue], expert: int) -> int | None:
    """Gives the expert to the host that would be done with it first, and returns that; None where it fits nowhere."""
    work, size = filling.task.work[expert], filling.task.bytes[expert]
    best: _Key | None = None
    looked: list[tuple[_Queue, list[int]]] = []
    for queue in queues:
        seen: list[int] = []
        while queue.heap and (best is None or queue.may_beat(best, filling, work)):
            seen.append(heappop(queue.heap)[-1])
            if filling.free[seen[-1]] >= size:
                found = filling.key(seen[-1], work)
                best = found if best is None else min(best, found)
                if queue.even:
                    break
        if seen:
            looked.append((queue, seen))
    if best is not None:
        filling.give(expert, best[-1])
    for queue, seen in looked:
        queue.back(seen, filling)
    return None if best is None else best[-1]


def _blocks(task: Task, order: Sequence[int]) -> Iterator[list[int]]:
    """The experts in runs, all with work or all without. The first are short, for there work falls steeply; later ones are so
    long that making the queues costs little beside using them."""
    most, longest = 32, max(32, len(task.speed) // 4)
    for _, run in groupby(order, key=lambda expert: task.work[expert] > 0):
        while block := list(islice(run, most)):
            yield block
            most = min(2 * most, longest)


def _descend(state: _State, tries: int) -> int:
    """Relieve the slowest host by a move or a swap, or else by dividing anew what it and one or two others hold, until
    nothing helps. Each step leaves its hosts below the slowest time, so it ends. Returns the tries that are left."""
    while tries > 0:
        slowest, last = state.ranked[-1]
        if slowest <= state.task.bound * CLOSE:
            break
        near = [host for _, host in state.ranked[: min(_NEAR, len(state.ranked) - 1)]]
        tries -= len(near) * len(state.held[last])
        moves = _best_swap(state, last, near)
        if not moves:
            far = [host for _, host in state.ranked[_NEAR:-1]]
            tries -= len(far) * len(state.held[last])
            moves = _best_swap(state, last, far)
        for group in chain(combinations(near, 1), combinations(near[:_NEAREST], 2)):
            if not moves and tries > 0:
                moves, spent = _anew(state, (last, *group), slowest)
                tries -= spent
        if not moves:
            break
        for expert, host in moves:
            state.move(expert, host)
    return tries


def _best_swap(state: _State, last: int, hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Of the moves and swaps between the slowest host and these, the one that leaves the slower of its two hosts fastest.
    A swap is for one of the few experts whose work is nearest to what would let both hosts be done together."""
    size, free, speed = state.task.bytes, state.free, state.task.speed
    mine, best, moves = state.load[last], state.load[last] / speed[last], []
    for host in hosts:
        theirs, held = state.load[host], state.held[host]
        even = (mine * speed[host] - theirs * speed[last]) / (speed[last] + speed[host])
        if (mine - even) / speed[last] >= best:
            continue
        for work, expert in state.held[last]:
            near = bisect_left(held, (work - even,))
            for back, other in (_NOTHING, *held[max(0, near - 2) : near + 2]):
                shift = work - back
                if mine - best * speed[last] < shift < best * speed[host] - theirs:
                    grown = size[expert] - (size[other] if other >= 0 else 0.0)
                    if -free[last] <= grown <= free[host]:
                        best = max((mine - shift) / speed[last], (theirs + shift) / speed[host])
                        moves = [(expert, host)] if other < 0 else [(expert, host), (other, last)]
    return moves


def _anew(state: _State, group: Sequence[int], limit: float) -> tuple[list[tuple[int, int]], int]:
    """The moves to a faster division of what these hosts hold, if a short search finds one, and the tries it took."""
    task = state.task
    experts = [expert for host in group for _, expert in state.held[host]]
    work, speed = [task.work[expert] for expert in experts], [task.speed[host] for host in group]
    room = [state.free[host] + sum(task.bytes[expert] for _, expert in state.held[host]) for host in group]
    search = Search(
        Task(work, [task.bytes[expert] for expert in experts], speed, room, lower_bound(work, speed)),
        limit,
        _GROUP_TRIES,
    )
    found = zip(experts, search.best or (), strict=False)
    return [
        (expert, group[index]) for expert, index in found if state.host_of[expert] != group[index]
    ], _GROUP_TRIES - search.tries


# --- the search


class Search:
    """Branch and bound: every expert on every host, heaviest first, leaving out what cannot be faster than ``limit``.
    ``best`` is what it found, if anything; while ``tries`` are left, nothing better exists."""

    def __init__(self, task: Task, limit: float, tries: int) -> None:
        self.task, self.limit, self.tries = task, limit, tries
        self.best: list[int] | None = None
        self._order = sorted(range(len(task.work)), key=lambda e: (-task.work[e], -task.bytes[e]))
        self._work_left = [*accumulate((task.work[e] for e in reversed(self._order)), initial=0.0)][::-1]
        self._bytes_left = [*accumulate((task.bytes[e] for e in reversed(self._order)), initial=0.0)][::-1]
        self._lightest = min((work for work in task.work if work), default=0.0)
        self._smallest = min(task.bytes, default=0.0)
        self._host_of = [0] * len(task.work)
        self._load, self._free, self._held = [0.0] * len(task.speed), list(task.room), [0] * len(task.speed)
        self._visit(0, 0.0)

    def _visit(self, depth: int, slowest: float) -> None:
        if depth == len(self._order):
            self.best, self.limit = list(self._host_of), slowest
            return
        expert = self._order[depth]
        for host in self._hosts(depth):
            if self.tries <= 0 or slowest >= self.limit or self.limit <= self.task.bound * PROVEN:
                return
            load, free = self._load[host], self._free[host]
            more = load + self.task.work[expert]
            time = more / self.task.speed[host]
            if time < self.limit:
                self.tries -= 1
                self._host_of[expert], self._load[host], self._free[host] = (
                    host,
                    more,
                    free - self.task.bytes[expert],
                )
                self._held[host] += 1
                self._visit(depth + 1, max(slowest, time))
                self._load[host], self._free[host] = load, free
                self._held[host] -= 1

    def _hosts(self, depth: int) -> list[int]:
        """Hosts to try for the next expert, the most promising first; none if what is left cannot fit into the time and
        the memory that are left, without the gaps too small for any expert. Of hosts alike the first is enough, and
        experts alike need only be on hosts in ascending order: the first of the best assignments by ids has both."""
        expert, before = self._order[depth], self._order[depth - 1]
        work, size = self.task.work[expert], self.task.bytes[expert]
        alike = depth > 0 and work > 0 and (work, size) == (self.task.work[before], self.task.bytes[before])
        first = self._host_of[before] if alike else 0
        time_left, room_left, seen, hosts = 0.0, 0.0, set(), []
        for host, state in enumerate(zip(self.task.speed, self._load, self._free, self._held, strict=True)):
            speed, load, free, held = state
            gap = self.limit * speed - load
            time_left += gap if gap >= self._lightest else 0.0
            room_left += free if free >= self._smallest else 0.0
            if host >= first and free >= size and state not in seen:
                seen.add(state)
                time = (load + work) / speed
                hosts.append((time, held, host) if work else (held, time, host))
        if time_left < self._work_left[depth] or room_left < self._bytes_left[depth]:
            return []
        return [host for *_, host in sorted(hosts)]
