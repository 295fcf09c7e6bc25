"""The search behind ``placement``: greedy starts with a descent, and branch and bound.

The descent relieves the slowest host. Branch and bound proves its result optimal where it ends."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, combinations
from operator import truediv

from experts.placement.greedy import greedy
from experts.placement.problem import CLOSE, PROVEN, PlacementProblem, first_overfull_host, lower_bound

_GROUP_TRIES = 300  # tries of a search over two or three hosts, of which there are many
_DESCENT_TRIES = 100_000  # pairs of an expert and another host that all descents together look at
_NUM_NEAR = 16  # hosts that finish first, which are looked at before all others
_NUM_NEAREST = 6  # ... and in pairs
_NO_EXPERT = (0.0, -1)  # in place of an expert in exchange: a move and not a swap

_Moves = list[tuple[int, int]]
"""Experts and the hosts that they move to."""


# --- the heuristic


def heuristic(problem: PlacementProblem) -> tuple[list[int] | None, float]:
    """Return the best assignment found and its slowest host's time.

    None and infinity: no start fits in memory."""
    best = None
    limit = math.inf
    tries = _DESCENT_TRIES
    for host_of in _starts(problem):
        state = _SearchState(problem, host_of)
        # Once a start is close to the bound, the others are compared but not improved.
        tries = _descend(state, tries if limit > problem.bound * CLOSE else 0)
        if state.slowest < limit:
            best = state.host_of
            limit = state.slowest
    return best, limit


def relieved(problem: PlacementProblem, host_of: Sequence[int], tries: int) -> list[int]:
    """Return an assignment with the slowest host relieved, by moves from the given one.

    ``tries`` limits the pairs of an expert and another host that are looked at."""
    state = _SearchState(problem, host_of)
    _descend(state, tries)
    return state.host_of


def _starts(problem: PlacementProblem) -> Iterator[list[int]]:
    """Yield assignments to start from.

    They are greedy by work, greedy by size where memory is limited, and round robin. With round
    robin among them, no result is worse than round robin."""
    experts = range(len(problem.work))
    by_work = _heaviest_first(problem)
    by_size = sorted(experts, key=lambda e: (-problem.bytes[e], -problem.work[e]))
    limited = min(problem.memory) < math.inf
    orders = [by_work, by_size] if limited and by_size != by_work else [by_work]
    assignments = [greedy(problem, order) for order in orders]
    yield from (host_of for host_of in assignments if host_of is not None)
    round_robin = [expert % len(problem.speed) for expert in experts]
    if first_overfull_host(round_robin, problem) is None:
        yield round_robin


def _heaviest_first(problem: PlacementProblem) -> list[int]:
    """Return the experts by descending work, and at equal work by descending size."""
    experts = range(len(problem.work))
    return sorted(experts, key=lambda e: (-problem.work[e], -problem.bytes[e]))


class _SearchState:
    """A complete assignment.

    For each host it has the load, the free memory and the experts, lightest first; and all hosts
    ordered by time."""

    def __init__(self, problem: PlacementProblem, host_of: Sequence[int]) -> None:
        self.problem = problem
        self.host_of = list(host_of)
        self.load = [0.0] * len(problem.speed)
        self.free = list(problem.memory)
        self.held: list[list[tuple[float, int]]] = [[] for _ in problem.speed]
        for expert, host in enumerate(host_of):
            self._add(expert, host)
        times = map(truediv, self.load, problem.speed)
        self.by_time = sorted(zip(times, range(len(problem.speed)), strict=True))

    def _add(self, expert: int, host: int) -> None:
        work = self.problem.work[expert]
        self.host_of[expert] = host
        self.load[host] += work
        self.free[host] -= self.problem.bytes[expert]
        insort(self.held[host], (work, expert))

    def move(self, expert: int, host: int) -> None:
        work = self.problem.work[expert]
        before = self.host_of[expert]
        # The order by time is searched with the old times, so the two hosts leave it before their
        # loads change.
        for each in (before, host):
            del self.by_time[bisect_left(self.by_time, (self.time(each), each))]
        self.held[before].remove((work, expert))
        self.load[before] -= work
        self.free[before] += self.problem.bytes[expert]
        self._add(expert, host)
        for each in (before, host):
            insort(self.by_time, (self.time(each), each))

    def time(self, host: int) -> float:
        return self.load[host] / self.problem.speed[host]

    @property
    def slowest(self) -> float:
        """Time of the slowest host."""
        return self.by_time[-1][0]


def _descend(state: _SearchState, tries: int) -> int:
    """Relieve the slowest host until nothing helps, and return the tries that are left.

    A step is a move or a swap, or else a new division of the experts of the slowest host and one or
    two others. Each step leaves its hosts below the slowest time, so that the descent ends."""
    while tries > 0:
        slowest, last = state.by_time[-1]
        if slowest <= state.problem.bound * CLOSE:
            break
        *others, _ = [host for _, host in state.by_time]
        near = others[:_NUM_NEAR]
        tries -= len(near) * len(state.held[last])
        moves = _best_swap(state, last, near)
        if not moves:
            far = others[_NUM_NEAR:]
            tries -= len(far) * len(state.held[last])
            moves = _best_swap(state, last, far)
        for group in chain(combinations(near, 1), combinations(near[:_NUM_NEAREST], 2)):
            if not moves and tries > 0:
                moves, spent = _divide_again(state, (last, *group), slowest)
                tries -= spent
        if not moves:
            break
        for expert, host in moves:
            state.move(expert, host)
    return tries


def _best_swap(state: _SearchState, last: int, hosts: Sequence[int]) -> _Moves:
    """Return the best move or swap between the slowest host and these.

    The best one leaves the slower of its two hosts fastest. For a swap only the few experts are
    tried whose work is nearest to that which lets both hosts finish together."""
    size = state.problem.bytes
    free = state.free
    speed = state.problem.speed
    load = state.load[last]
    best = load / speed[last]
    moves: _Moves = []
    for host in hosts:
        other_load = state.load[host]
        other_held = state.held[host]
        # The work to shift so that both hosts finish together: no shift can be better.
        even = (load * speed[host] - other_load * speed[last]) / (speed[last] + speed[host])
        if (load - even) / speed[last] >= best:
            continue
        for work, expert in state.held[last]:
            near = bisect_left(other_held, (work - even,))
            for other_work, other in (_NO_EXPERT, *other_held[max(0, near - 2) : near + 2]):
                shift = work - other_work
                if load - best * speed[last] < shift < best * speed[host] - other_load:
                    growth = size[expert] - (size[other] if other >= 0 else 0.0)
                    if -free[last] <= growth <= free[host]:
                        best = max((load - shift) / speed[last], (other_load + shift) / speed[host])
                        moves = [(expert, host)] if other < 0 else [(expert, host), (other, last)]
    return moves


def _divide_again(state: _SearchState, group: Sequence[int], limit: float) -> tuple[_Moves, int]:
    """Search briefly for a faster division of the experts of these hosts.

    Return its moves, and the tries spent."""
    problem = state.problem
    experts = [expert for host in group for _, expert in state.held[host]]
    work = [problem.work[expert] for expert in experts]
    sizes = [problem.bytes[expert] for expert in experts]
    speed = [problem.speed[host] for host in group]
    memory: list[float] = []
    for host in group:
        held_bytes = sum(problem.bytes[expert] for _, expert in state.held[host])
        memory.append(state.free[host] + held_bytes)
    part = PlacementProblem(work, sizes, speed, memory, lower_bound(work, speed))
    search = BranchAndBound(part, limit, _GROUP_TRIES)
    moves: _Moves = []
    for expert, index in zip(experts, search.best or (), strict=False):
        if state.host_of[expert] != group[index]:
            moves.append((expert, group[index]))
    return moves, _GROUP_TRIES - search.tries_left


# --- branch and bound


class BranchAndBound:
    """A search over every expert on every host, heaviest first.

    It skips assignments that cannot be faster than ``limit``. ``best`` is the best one found, if
    any. While ``tries_left`` is above zero, nothing better exists."""

    def __init__(self, problem: PlacementProblem, limit: float, tries: int) -> None:
        self.problem = problem
        self.limit = limit
        self.tries_left = tries
        self.best: list[int] | None = None
        self._order = _heaviest_first(problem)
        self._work_left = self._sums_from_end(problem.work)
        self._bytes_left = self._sums_from_end(problem.bytes)
        self._lightest = min((work for work in problem.work if work), default=0.0)
        self._smallest = min(problem.bytes, default=0.0)
        self._host_of = [0] * len(problem.work)
        self._load = [0.0] * len(problem.speed)
        self._free = list(problem.memory)
        self._num_held = [0] * len(problem.speed)
        self._visit(0, 0.0)

    def _sums_from_end(self, values: Sequence[float]) -> list[float]:
        """Return for each depth the sum over the experts that are not assigned yet."""
        reversed_values = [values[expert] for expert in reversed(self._order)]
        return [*accumulate(reversed_values, initial=0.0)][::-1]

    def _visit(self, depth: int, slowest: float) -> None:
        if depth == len(self._order):
            self.best = list(self._host_of)
            self.limit = slowest
            return
        expert = self._order[depth]
        for host in self._candidates(depth):
            # Checked for every host: the visit of the last one may have lowered the limit or used
            # up the tries.
            if self.tries_left <= 0 or slowest >= self.limit or self.limit <= self.problem.bound * PROVEN:
                return
            load = self._load[host]
            free = self._free[host]
            new_load = load + self.problem.work[expert]
            time = new_load / self.problem.speed[host]
            if time < self.limit:
                self.tries_left -= 1
                self._host_of[expert] = host
                self._load[host] = new_load
                self._free[host] = free - self.problem.bytes[expert]
                self._num_held[host] += 1
                self._visit(depth + 1, max(slowest, time))
                self._load[host] = load
                self._free[host] = free
                self._num_held[host] -= 1

    def _candidates(self, depth: int) -> list[int]:
        """Return the hosts to try for the next expert, the most promising first.

        None is left where the remaining experts cannot fit into the remaining time and memory; gaps
        too small for any expert do not count. Of hosts alike, the first is enough. Experts alike
        are tried on hosts in ascending order only. The first optimal assignment by ids satisfies
        both, so that it is not skipped."""
        problem = self.problem
        expert = self._order[depth]
        work = problem.work[expert]
        size = problem.bytes[expert]
        first_host = self._first_host(depth)
        time_left = 0.0
        memory_left = 0.0
        seen: set[tuple[float, ...]] = set()
        candidates: list[tuple[float, float, int]] = []
        states = zip(problem.speed, self._load, self._free, self._num_held, strict=True)
        for host, state in enumerate(states):
            speed, load, free, num_held = state
            gap = self.limit * speed - load
            time_left += gap if gap >= self._lightest else 0.0
            memory_left += free if free >= self._smallest else 0.0
            if host >= first_host and free >= size and state not in seen:
                seen.add(state)
                time = (load + work) / speed
                candidates.append((time, num_held, host) if work else (num_held, time, host))
        if time_left < self._work_left[depth] or memory_left < self._bytes_left[depth]:
            return []
        return [host for *_, host in sorted(candidates)]

    def _first_host(self, depth: int) -> int:
        """Return the first host to try: that of the previous expert, if the two are alike."""
        if depth == 0:
            return 0
        problem = self.problem
        expert = self._order[depth]
        previous = self._order[depth - 1]
        same_work = problem.work[expert] == problem.work[previous] > 0
        same_size = problem.bytes[expert] == problem.bytes[previous]
        return self._host_of[previous] if same_work and same_size else 0
