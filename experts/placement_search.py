"""The search behind ``placement``, over plain numbers: heaviest first and descent from the slowest host; and branch and bound,
which proves what it finds where it ends."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
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
    """A whole assignment: per host its load, its free memory and its experts, lightest first."""

    def __init__(self, task: Task, host_of: Sequence[int]) -> None:
        self.task = task
        self.host_of = list(host_of)
        self.load = [0.0] * len(task.speed)
        self.free = list(task.room)
        self.held: list[list[tuple[float, int]]] = [[] for _ in task.speed]
        for expert, host in enumerate(host_of):
            self._put(expert, host)

    def _put(self, expert: int, host: int) -> None:
        work = self.task.work[expert]
        self.host_of[expert] = host
        self.load[host] += work
        self.free[host] -= self.task.bytes[expert]
        insort(self.held[host], (work, expert))

    def move(self, expert: int, host: int) -> None:
        work, before = self.task.work[expert], self.host_of[expert]
        self.held[before].remove((work, expert))
        self.load[before] -= work
        self.free[before] += self.task.bytes[expert]
        self._put(expert, host)

    def times(self) -> list[float]:
        return list(map(truediv, self.load, self.task.speed))


def heuristic(task: Task) -> tuple[list[int] | None, float]:
    """The best assignment found and its slowest host's time in units; none and infinity if memory stood in the way."""
    best, limit, tries = None, math.inf, _DESCENT_TRIES
    for host_of in _starts(task):
        state = _State(task, host_of)
        tries = _descend(state, tries if limit > task.bound * CLOSE else 0)
        if max(state.times()) < limit:
            best, limit = state.host_of, max(state.times())
    return best, limit


def _starts(task: Task) -> Iterator[list[int]]:
    """By work, by size where memory is limited, and round robin, so that nothing found is worse than that."""
    experts = range(len(task.work))
    by_work = sorted(experts, key=lambda e: (-task.work[e], -task.bytes[e]))
    by_size = sorted(experts, key=lambda e: (-task.bytes[e], -task.work[e]))
    limited = min(task.room) < math.inf
    found = [greedy(task, order) for order in ((by_work, by_size) if limited and by_size != by_work else (by_work,))]
    yield from (host_of for host_of in found if host_of is not None)
    turns = [expert % len(task.speed) for expert in experts]
    if overfull(turns, task) is None:
        yield turns


def greedy(task: Task, order: Sequence[int]) -> list[int] | None:
    """Each expert, in this order, to the host that would be done with it first; without work, to the one with the fewest.
    A heap orders the hosts as the lightest expert of a block would find them, so few are looked at for each expert."""
    host_of = [0] * len(order)
    load, free, held = [0.0] * len(task.speed), list(task.room), [0] * len(task.speed)

    def key(host: int, work: float) -> tuple[float, float, int]:
        time = (load[host] + work) / task.speed[host]
        return (time, held[host], host) if work else (held[host], time, host)

    for block in _blocks(task, order):
        lightest, smallest = min(task.work[expert] for expert in block), min(task.bytes[expert] for expert in block)
        heap = [key(host, lightest) for host, room in enumerate(free) if room >= smallest]
        heapify(heap)
        for expert in block:
            seen, best = [], None
            while heap and (best is None or heap[0] < best):
                seen.append(heappop(heap))
                host = seen[-1][-1]
                if free[host] >= task.bytes[expert]:
                    found = key(host, task.work[expert])
                    best = found if best is None else min(best, found)
            if best is None:
                return None
            host_of[expert] = host = best[-1]
            load[host] += task.work[expert]
            free[host] -= task.bytes[expert]
            held[host] += 1
            for entry in seen:
                heappush(heap, key(host, lightest) if entry[-1] == host else entry)
    return host_of


def _blocks(task: Task, order: Sequence[int]) -> Iterator[list[int]]:
    """The experts in runs of at most 32, all with work or all without."""
    for _, run in groupby(order, key=lambda expert: task.work[expert] > 0):
        while block := list(islice(run, 32)):
            yield block


def _descend(state: _State, tries: int) -> int:
    """Relieve the slowest host by a move or a swap, or else by dividing anew what it and one or two others hold, until
    nothing helps. Each step leaves its hosts below the slowest time, so it ends. Returns the tries that are left."""
    while tries > 0:
        times = state.times()
        *others, last = sorted(range(len(times)), key=times.__getitem__)
        if times[last] <= state.task.bound * CLOSE:
            break
        moves: list[tuple[int, int]] = []
        for hosts in (others[:_NEAR], others[_NEAR:]):
            if not moves:
                tries -= len(hosts) * len(state.held[last])
                moves = _best_swap(state, last, hosts)
        for group in chain(combinations(others[:_NEAR], 1), combinations(others[:_NEAREST], 2)):
            if not moves and tries > 0:
                moves, spent = _anew(state, (last, *group), times[last])
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
    search = Search(Task(work, [task.bytes[expert] for expert in experts], speed, room, lower_bound(work, speed)), limit, _GROUP_TRIES)
    found = zip(experts, search.best or (), strict=False)
    return [(expert, group[index]) for expert, index in found if state.host_of[expert] != group[index]], _GROUP_TRIES - search.tries


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
                self._host_of[expert], self._load[host], self._free[host] = host, more, free - self.task.bytes[expert]
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
