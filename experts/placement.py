"""Which host holds which expert: the assignment whose slowest host is done first, within the memory of each. Pure.

Loads are balanced over measured speeds, so hosts may hold different numbers of experts and nothing has to divide evenly.
Work is counted in whole units, so sums are exact in any order: every host and every Python comes to the same placement.
"""

from __future__ import annotations

import json
import math
import reprlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, groupby, islice
from operator import truediv
from typing import Any

_UNITS = 2**32  # of work, in the heaviest expert: coarse enough to hide the rounding of a common factor, and what is below is none
_PROVEN = 1 + 1e-9  # this near the lower bound no assignment is better
_CLOSE = 1 + 5e-4  # ... and this near it none is better by more than the speeds are known
_SMALL = 24  # experts; with more the search over all hosts rarely ends
_SEARCH_TRIES = 50_000  # hosts tried for an expert by the whole search: about half a second
_GROUP_TRIES = 300  # ... and by the search over two or three hosts, of which there are many
_DESCENT_TRIES = 100_000  # pairs of an expert and another host that the descents look at together
_NEAR = 16  # hosts done first, which are looked at before all others
_NEAREST = 6  # ... and two at a time
_NOTHING = (0.0, -1)  # what comes back for an expert that moves


@dataclass(frozen=True)
class ExpertCost:
    """``work``: FLOPs of the rows expected for it; ``bytes``: its parameters, gradients and optimizer state."""

    work: float
    bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("work", self.work), ("bytes", self.bytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"an expert's {name} is {value}; it must be a number, 0 or more")


@dataclass(frozen=True)
class HostFacts:
    """``speed``: measured FLOPs per second; ``memory``: bytes it may use for experts, of all layers together."""

    speed: float
    memory: float = math.inf
    node: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ValueError(f"a host's speed is {self.speed}; it must be a number above 0")
        if not self.memory >= 0:
            raise ValueError(f"a host's memory is {self.memory}; it must be 0 bytes or more")


@dataclass(frozen=True)
class Placement:
    """Who holds what, and how long each host is expected to compute. ``bound`` and ``mean`` say what could be hoped for:
    no placement's slowest host is faster than ``bound``; ``mean`` is all work over all speed."""

    host_of: tuple[int, ...]
    seconds: tuple[float, ...]
    bound: float
    method: str
    mean: float

    @property
    def slowest(self) -> float:
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        return self.slowest / self.mean if self.mean else 1.0

    @property
    def gap(self) -> float:
        return max(0.0, self.slowest / self.bound - 1) if self.bound else 0.0

    def held(self, host: int) -> tuple[int, ...]:
        return tuple(expert for expert, holder in enumerate(self.host_of) if holder == host)

    def sentence(self) -> str:
        experts, hosts = _counted(len(self.host_of), "expert"), _counted(len(self.seconds), "host")
        measure = f"slowest host {self.imbalance:.2f} of the mean, {self.gap:.1%} above the lower bound"
        return f"{experts} on {hosts} ({self.method}): {measure}"


class CannotPlace(ValueError):
    """The experts do not fit into the memory of the hosts."""


def place(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float] = ()) -> Placement:
    """The assignment with the fastest slowest host; ``used`` are the bytes that other layers took on each host.

    Heaviest first, each to where it would be done first, then descent from the slowest host; never worse than round robin.
    Up to ``_SMALL`` experts a branch and bound follows. The method is "exact" where nothing better exists, else "lpt".
    An expert without work goes, in its turn, to the host with the fewest experts; so do ties, then to the lowest index.
    """
    task = _task(experts, hosts, used)
    _check_room(task, hosts)
    best, limit = _heuristic(task)
    proven = limit <= task.bound * _PROVEN
    if not proven and len(experts) <= _SMALL:
        search = _Search(task, limit, _SEARCH_TRIES if limit > task.bound * _CLOSE else _SEARCH_TRIES // 10)
        best, proven = search.best or best, search.tries > 0
    if best is None:
        raise CannotPlace(_no_division(task, proven))
    return _placement(best, experts, hosts, "exact" if proven else "lpt")


def round_robin(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float] = ()) -> Placement:
    """Expert ``i`` on host ``i`` modulo the number of hosts, whatever it costs."""
    task = _task(experts, hosts, used)
    host_of = [expert % len(hosts) for expert in range(len(experts))]
    _check_memory(host_of, task, hosts)
    return _placement(host_of, experts, hosts, "round_robin")


def given(host_of: Sequence[int], experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float] = ()) -> Placement:
    """An assignment made by someone else, checked."""
    task = _task(experts, hosts, used)
    _check_ids(host_of, len(experts), len(hosts), "the placement")
    _check_memory(host_of, task, hosts)
    return _placement(host_of, experts, hosts, "file")


def read_placement(text: str, layers: int, experts: Sequence[int], hosts: int) -> list[tuple[int, ...]]:
    """A placement file: ``{"host_of": [0, 1, 1]}`` for every layer, or ``{"layers": [[0, 1, 1], [1, 0, 0]]}`` for each.
    ``experts`` are the numbers of experts of the layers."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the placement file is not JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict) or found.keys() not in ({"host_of"}, {"layers"}):
        what = f"the keys {reprlib.repr(sorted(found))}" if isinstance(found, dict) else reprlib.repr(found)
        raise ValueError(f'the placement file has {what}; it needs {{"host_of": [...]}} or {{"layers": [[...], ...]}}')
    per_layer = [found["host_of"]] * layers if "host_of" in found else found["layers"]
    if not isinstance(per_layer, list) or len(per_layer) != layers:
        what = _counted(len(per_layer), "layer") if isinstance(per_layer, list) else reprlib.repr(per_layer)
        raise ValueError(f'the placement file has {what} under "layers"; the model needs a list of {_counted(layers, "MoE layer")}')
    for layer, (host_of, count) in enumerate(zip(per_layer, experts, strict=True)):
        _check_ids(host_of, count, hosts, f"layer {layer} of the placement file")
    return [tuple(host_of) for host_of in per_layer]


# --- what is to be placed


@dataclass(frozen=True)
class _Task:
    """Work in whole units, the room that is left on each host, and a lower bound of the slowest host's time."""

    work: list[float]
    bytes: list[float]
    speed: list[float]
    room: list[float]
    bound: float


def _task(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float]) -> _Task:
    if not hosts:
        raise ValueError(f"{_counted(len(experts), 'expert')} cannot be placed on no host; at least one is needed")
    if used and len(used) != len(hosts):
        raise ValueError(f"bytes in use are given for {_counted(len(used), 'host')}; there are {len(hosts)}")
    heaviest = max((expert.work for expert in experts), default=0.0) or 1.0
    work, speed = [float(round(expert.work / heaviest * _UNITS)) for expert in experts], [host.speed for host in hosts]
    room = [max(0.0, host.memory - taken) for host, taken in zip(hosts, used or [0.0] * len(hosts), strict=True)]
    return _Task(work, [expert.bytes for expert in experts], speed, room, _bound(work, speed))


def _bound(work: Sequence[float], speed: Sequence[float]) -> float:
    """Of all work over all hosts, and of the few heaviest experts over as many of the fastest hosts, the longest time."""
    total = math.fsum(work) / math.fsum(speed)
    heaviest, fastest = accumulate(sorted(work, reverse=True)), accumulate(sorted(speed, reverse=True))
    return max([total, *(most / best for most, best in zip(heaviest, fastest, strict=False))])


def _placement(host_of: Sequence[int], experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], method: str) -> Placement:
    shares: list[list[float]] = [[] for _ in hosts]
    for expert, host in zip(experts, host_of, strict=True):
        shares[host].append(expert.work)
    work, speed = [expert.work for expert in experts], [host.speed for host in hosts]
    seconds = tuple(math.fsum(share) / host.speed for share, host in zip(shares, hosts, strict=True))
    return Placement(tuple(host_of), seconds, _bound(work, speed), method, math.fsum(work) / math.fsum(speed))


# --- the heuristic


class _State:
    """A whole assignment: per host its load, its free memory and its experts, lightest first."""

    def __init__(self, task: _Task, host_of: Sequence[int]) -> None:
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


def _heuristic(task: _Task) -> tuple[list[int] | None, float]:
    """The best assignment found and its slowest host's time in units; none and infinity if memory stood in the way."""
    best, limit, tries = None, math.inf, _DESCENT_TRIES
    for host_of in _starts(task):
        state = _State(task, host_of)
        tries = _descend(state, tries if limit > task.bound * _CLOSE else 0)
        if max(state.times()) < limit:
            best, limit = state.host_of, max(state.times())
    return best, limit


def _starts(task: _Task) -> Iterator[list[int]]:
    """By work, by size where memory is limited, and round robin, so that nothing found is worse than that."""
    experts = range(len(task.work))
    by_work = sorted(experts, key=lambda e: (-task.work[e], -task.bytes[e]))
    by_size = sorted(experts, key=lambda e: (-task.bytes[e], -task.work[e]))
    limited = min(task.room) < math.inf
    found = [_greedy(task, order) for order in ((by_work, by_size) if limited and by_size != by_work else (by_work,))]
    yield from (host_of for host_of in found if host_of is not None)
    turns = [expert % len(task.speed) for expert in experts]
    if _overfull(turns, task) is None:
        yield turns


def _greedy(task: _Task, order: Sequence[int]) -> list[int] | None:
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


def _blocks(task: _Task, order: Sequence[int]) -> Iterator[list[int]]:
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
        if times[last] <= state.task.bound * _CLOSE:
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
    search = _Search(_Task(work, [task.bytes[expert] for expert in experts], speed, room, _bound(work, speed)), limit, _GROUP_TRIES)
    found = zip(experts, search.best or (), strict=False)
    return [(expert, group[index]) for expert, index in found if state.host_of[expert] != group[index]], _GROUP_TRIES - search.tries


# --- the search


class _Search:
    """Branch and bound: every expert on every host, heaviest first, leaving out what cannot be faster than ``limit``.
    ``best`` is what it found, if anything; while ``tries`` are left, nothing better exists."""

    def __init__(self, task: _Task, limit: float, tries: int) -> None:
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
            if self.tries <= 0 or slowest >= self.limit or self.limit <= self.task.bound * _PROVEN:
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


# --- checks and words


def _check_room(task: _Task, hosts: Sequence[HostFacts]) -> None:
    """What no assignment can hold is told before one is looked for."""
    needed, offered = math.fsum(task.bytes), math.fsum(task.room)
    if needed > offered:
        experts, on = _counted(len(task.work), "expert"), _counted(len(hosts), "host")
        raise CannotPlace(
            f"{experts} need {_size(needed)}; {on} have room for {_size(offered)}. Use fewer or smaller experts, or more hosts"
        )
    largest = max(range(len(task.bytes)), key=task.bytes.__getitem__, default=None)
    widest = max(range(len(hosts)), key=task.room.__getitem__)
    if largest is not None and task.bytes[largest] > task.room[widest]:
        size, room, where = _size(task.bytes[largest]), _size(task.room[widest]), _named(widest, hosts)
        raise CannotPlace(
            f"expert {largest} needs {size}; the most room is {room}, on {where}. Make the experts smaller, or use hosts with more memory"
        )


def _overfull(host_of: Sequence[int], task: _Task) -> tuple[int, float] | None:
    """The first host that would hold more than it has room for, and how much that is."""
    needed = [0.0] * len(task.room)
    for size, host in zip(task.bytes, host_of, strict=True):
        needed[host] += size
    return next(((host, most) for host, most in enumerate(needed) if most > task.room[host]), None)


def _check_memory(host_of: Sequence[int], task: _Task, hosts: Sequence[HostFacts]) -> None:
    found = _overfull(host_of, task)
    if found:
        host, needed = found
        raise CannotPlace(
            f"{_named(host, hosts)} would hold experts of {_size(needed)}; it has room for {_size(task.room[host])}. "
            "Move some of them elsewhere, or have them placed by cost"
        )


def _no_division(task: _Task, proven: bool) -> str:
    experts, hosts = _counted(len(task.work), "expert"), _counted(len(task.speed), "host")
    what = "no division of them among the hosts fits" if proven else "no division that fits was found"
    return (
        f"{experts} need {_size(math.fsum(task.bytes))}; {hosts} have room for {_size(math.fsum(task.room))}, but {what}. "
        "Leave more room, or make the experts smaller"
    )


def _check_ids(host_of: Any, experts: int, hosts: int, where: str) -> None:
    if not isinstance(host_of, Sequence) or isinstance(host_of, str) or len(host_of) != experts:
        what = _counted(len(host_of), "host number") if isinstance(host_of, list | tuple) else reprlib.repr(host_of)
        raise ValueError(f"{where} has {what}; it needs a list of {experts}, one for each expert")
    for expert, host in enumerate(host_of):
        if type(host) is not int or not 0 <= host < hosts:
            raise ValueError(f"{where} puts expert {expert} on host {reprlib.repr(host)}; hosts are whole numbers from 0 to {hosts - 1}")


def _named(host: int, hosts: Sequence[HostFacts]) -> str:
    return f"host {host} ({hosts[host].node})" if hosts[host].node else f"host {host}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
