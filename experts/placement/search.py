"""The one search for the hosts of experts: it places, moves, swaps and copies.

A placement at the start of a run begins with the longest processing time first; a change while training
begins with the hosts and shares that the experts have. From there a descent relieves the slowest host,
one action at a time, and compares all actions at once. Where it ends, detours begin: an action that wins
nothing, or for which a host has too little memory, with another descent after it.

Letters of shapes: L loads, S copies on the slowest host, X copies or none in exchange, C all copies, H
hosts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product

import numpy as np

from experts.copy_costs import ring_factor
from experts.placement.division import Division, SearchBudget, Shares, on_one_host_each
from experts.placement.problem import CLOSE, PROVEN, Problem, bytes_as_work, first_overfull_host, lower_bound

_ADJUST_ROUNDS = 3  # after each action
_MOVES_FIRST = 0.7  # of the gain of a copy: a move that gains as much is taken instead
_MAX_PAIRS = 2**15  # of copies that are compared for one action: with more, some are left out
_DETOURS_OF_PLACING = 40
_BUDGET_OF_PLACING = 100_000  # half a second to one second; only thousands of experts need as much
_MAX_ENUMERATED = 4096  # assignments that are all compared
_FEW = 24  # experts: then there are more detours, from every start
_DETOURS_OF_FEW = 96
_ROUNDS = 4  # of detours
_MAX_REPAIRS = 8  # moves after a detour until every host has enough memory
_MAX_STALLS = 16  # actions in turn that do not lower the cost
_UNITS_PER_CALL = 32  # of the budget
_PAIRS_PER_UNIT = 64  # of the budget: they are compared at once
_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search, and the prices of what it does."""

    aim: float
    """The slowest host's time as a multiple of the mean, at which the search ends."""
    moves: bool = True
    """Whether experts may leave a host. Copies that are added hurt under no loads."""
    max_copies: int = 1
    max_bytes: float = math.inf
    seconds_per_byte: float = 0.0
    """The price of a byte that is moved, spread over the steps that it serves."""
    detours: int = 4
    """Detours that are tried from one division, until one of them wins."""


# --- placing at the start of a run


def placed(problem: Problem) -> list[int] | None:
    """Return a host for each expert; None where no division that fits into memory was found."""
    bound = lower_bound(problem.work, problem.speed)
    found = _best_placement(problem, CLOSE * bound / problem.mean if problem.mean else 1.0)
    slowest = math.inf if found is None else _slowest(problem, found)
    if slowest <= bound * PROVEN or len(problem.speed) ** len(problem.work) > _MAX_ENUMERATED:
        return found
    return _best_of_all(problem, slowest) or found


def _best_of_all(problem: Problem, slowest: float) -> list[int] | None:
    """Return the best of all assignments; None where none fits into memory and is faster than ``slowest``.

    With few experts and little memory, a search from a few starts may miss the only good one."""
    best = None
    for host_of in product(range(len(problem.speed)), repeat=len(problem.work)):
        seconds = _slowest(problem, host_of)
        if seconds < slowest * (1 - 1e-9) and first_overfull_host(host_of, problem) is None:
            best = host_of
            slowest = seconds
    return None if best is None else list(best)


def _slowest(problem: Problem, host_of: Sequence[int]) -> float:
    load_H = [0.0] * len(problem.speed)
    for work, host in zip(problem.work, host_of, strict=True):
        load_H[host] += work
    return max(load / speed for load, speed in zip(load_H, problem.speed, strict=True))


def _best_placement(problem: Problem, aim: float) -> list[int] | None:
    are_few = len(problem.work) <= _FEW
    limits = SearchLimits(aim, detours=_DETOURS_OF_FEW if are_few else _DETOURS_OF_PLACING)
    budget = SearchBudget(_BUDGET_OF_PLACING)
    divisions: list[Division] = []
    for host_of in _starts(problem):
        division = Division([problem], on_one_host_each(host_of), budget)
        _descend(division, limits)
        if division.excess <= aim:
            return division.alone_E.tolist()
        divisions.append(division)
    divisions.sort(key=lambda division: division.excess)
    # Many experts leave many ways from the best one already.
    found = [_with_detours(division, limits) for division in divisions[: None if are_few else 1]]
    best = min(found, key=lambda division: division.excess, default=None)
    return None if best is None else best.alone_E.tolist()


def _starts(problem: Problem) -> Iterator[list[int]]:
    """Yield assignments to start from: the heaviest experts first, the largest first, and round robin.

    With round robin among them, no result is worse than round robin. Where none of them fits, the same
    search divides the bytes among the memory."""
    experts = range(len(problem.work))
    by_work = sorted(experts, key=lambda e: (-problem.work[e], -problem.bytes[e]))
    by_size = sorted(experts, key=lambda e: (-problem.bytes[e], -problem.work[e]))
    limited = min(problem.memory) < math.inf
    orders = [by_work, by_size] if limited and by_size != by_work else [by_work]
    starts = [longest_first(problem, order) for order in orders]
    round_robin = [expert % len(problem.speed) for expert in experts]
    starts.append(round_robin if first_overfull_host(round_robin, problem) is None else None)
    if not any(starts):
        starts.append(_fitting(problem))
    yield from (host_of for host_of in starts if host_of is not None)


def _fitting(problem: Problem) -> list[int] | None:
    filling = bytes_as_work(problem)
    host_of = _best_placement(filling, 1 / filling.mean) if filling.mean else None
    return host_of if host_of and first_overfull_host(host_of, problem) is None else None


def longest_first(problem: Problem, order: Sequence[int]) -> list[int] | None:
    """Assign each expert, in this order, to the host that would finish it first.

    Of hosts that finish it together, and for an expert without work of all hosts, the one with the fewest
    experts is taken, then the first. Returns None where an expert fits nowhere."""
    speed_H = np.array(problem.speed, dtype=np.float64)
    free_H = np.array(problem.memory, dtype=np.float64)
    load_H = np.zeros(len(speed_H))
    held_H = np.zeros(len(speed_H))
    host_of = [0] * len(order)
    for expert in order:
        work = problem.work[expert]
        size = problem.bytes[expert]
        seconds_H = (load_H + work) / speed_H
        first_H, second_H = (seconds_H, held_H) if work else (held_H, seconds_H)
        first_H = np.where(free_H >= size, first_H, math.inf)
        least = first_H.min()
        if least == math.inf:
            return None
        ties = np.flatnonzero(first_H == least)
        host = int(ties[second_H[ties].argmin()])
        host_of[expert] = host
        load_H[host] += work
        free_H[host] -= size
        held_H[host] += 1
    return host_of


# --- descent and detours


def improve(
    problems: Sequence[Problem], shares: Shares, limits: SearchLimits, budget: SearchBudget
) -> Shares:
    """Move and copy experts until the aim is reached, nothing pays, or bytes or budget are used up.

    The problems differ in the loads; the result suits all of them."""
    division = Division(problems, shares, budget)
    division.settle()
    _descend(division, limits)
    division = _with_detours(division, limits)
    division.settle()
    return division.shares


def _with_detours(division: Division, limits: SearchLimits) -> Division:
    left = _ROUNDS * limits.detours
    while left > 0 and not _is_done(division, limits):
        cost = _cost(division, limits)
        for action in _actions(division, limits, _NOBODY, limits.detours):
            left -= 1
            trial = division.clone()
            action.apply(trial)
            # The expert stays there at first: otherwise it would only go back.
            _descend(trial, limits, {action.expert})
            if _is_less(_cost(trial, limits), cost):
                division = trial
                break
        else:
            break
    return division


def _descend(division: Division, limits: SearchLimits, fixed: AbstractSet[int] = _NOBODY) -> None:
    """Relieve the slowest host until nothing helps; before that, a host with too little memory."""
    repairs = 0
    stalls = 0
    least = (math.inf, math.inf)
    while repairs < _MAX_REPAIRS and stalls < _MAX_STALLS and not _is_done(division, limits):
        is_repair = division.is_overfull
        best = _actions(division, limits, fixed, 1)
        if not best or (best[0].value <= 0 and not is_repair):
            break
        best[0].apply(division)
        division.adjust(_ADJUST_ROUNDS, frozenset((best[0].source, best[0].destination)))
        if is_repair:
            repairs += 1
            fixed = {*fixed, best[0].expert, best[0].in_exchange}
            continue
        cost = _cost(division, limits)
        stalls = 0 if _is_less(cost, least) else stalls + 1
        least = min(least, cost)


def _is_done(division: Division, limits: SearchLimits) -> bool:
    is_reached = division.excess <= limits.aim and not division.is_overfull
    return is_reached or division.budget.is_spent


def _cost(division: Division, limits: SearchLimits) -> tuple[float, float]:
    """Return the seconds that count, and a measure of how uneven all hosts are.

    The seconds are the slowest host's in the mean over the loads, and the price of what was sent."""
    if division.is_overfull:
        return math.inf, math.inf
    seconds_LH = division.seconds_LH
    slowest = float(np.maximum(seconds_LH.max(1), division.mean_L).mean())
    return slowest + division.bytes_moved * limits.seconds_per_byte, float((seconds_LH**2).sum())


def _is_less(cost: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a cost is less than another, by more than rounding."""
    is_equal = abs(cost[0] - other[0]) <= 1e-9 * other[0]
    return cost[1] < other[1] * (1 - 1e-9) if is_equal else cost[0] < other[0]


# --- actions


@dataclass(frozen=True)
class _Action:
    """A move, a swap or a copy."""

    value: float
    """Seconds per step that it wins, less what it costs."""
    expert: int
    source: int
    destination: int
    in_exchange: int = -1
    is_copy: bool = False

    def apply(self, division: Division) -> None:
        if self.is_copy:
            division.copy(self.expert, self.destination)
            return
        division.move(self.expert, self.source, self.destination)
        if self.in_exchange >= 0:
            division.move(self.in_exchange, self.destination, self.source)


def _actions(division: Division, limits: SearchLimits, fixed: AbstractSet[int], count: int) -> list[_Action]:
    """Return the best actions that relieve the slowest host, the best first.

    Where a host has too little memory, those that relieve it. Several (``count`` above 1) are for detours:
    then the hosts that they go to may have too little memory, and nothing is sorted out that wins nothing."""
    if division.is_overfull:
        source = int(division.free_H.argmin())
    else:
        source = int(division.seconds_LH[division.excess_L.argmax()].argmax())
    moves = _exchanges(division, source, limits, fixed, count) if limits.moves else []
    copies = _copies(division, source, limits, fixed, count) if limits.max_copies > 1 else []
    if count == 1 and moves and copies and moves[0].value >= _MOVES_FIRST * copies[0].value:
        return moves
    return sorted((*moves, *copies), key=lambda action: -action.value)[:count]


def _exchanges(
    division: Division, source: int, limits: SearchLimits, fixed: AbstractSet[int], count: int
) -> list[_Action]:
    """Return the best moves of a copy from one host to others, alone or in exchange for another copy."""
    num_hosts = len(division.free_H)
    experts_C, hosts_C, shares_C = division.all_copies()
    may_move_C = shares_C > 0
    for expert in fixed:
        may_move_C &= experts_C != expert
    is_here_C = hosts_C == source
    given = np.flatnonzero(is_here_C & may_move_C)
    other = np.flatnonzero(~is_here_C & may_move_C)
    other = other[:: 1 + len(given) * (len(other) + num_hosts) // _MAX_PAIRS]
    # In exchange for nothing, once for each host, it is a move.
    destinations = np.flatnonzero(np.arange(num_hosts) != source)
    is_move_X = np.arange(len(destinations) + len(other)) < len(destinations)
    hosts_X = np.concatenate((destinations, hosts_C[other]))
    others_X = np.concatenate((np.full(len(destinations), -1), experts_C[other]))
    shares_X = np.concatenate((np.zeros(len(destinations)), shares_C[other]))
    sizes_X = np.where(is_move_X, 0.0, division.bytes_E[others_X])
    experts_S = experts_C[given]
    sizes_S = division.bytes_E[experts_S]

    work_LS = division.work_LE[:, experts_S] * shares_C[given]
    work_LX = division.work_LE[:, others_X] * shares_X
    value_SX = _gain(division, source, hosts_X, work_LS[:, :, None] - work_LX[:, None, :])
    growth_SX = sizes_S[:, None] - sizes_X
    lacking_SX = np.maximum(0.0, growth_SX - division.free_H[hosts_X])
    is_allowed_SX = np.ones(value_SX.shape, dtype=bool)
    if count == 1:
        is_allowed_SX &= -growth_SX <= division.free_H[source]
        if division.is_overfull:
            value_SX = value_SX - lacking_SX * (1e3 * division.mean_L.max())  # memory first
        else:
            is_allowed_SX &= lacking_SX == 0
    if len(experts_C) > len(division.copies):
        is_allowed_SX &= ~_has_SH(division.copies, experts_S, num_hosts)[:, hosts_X]
        is_allowed_SX &= np.array([e < 0 or source not in division.copies[e] for e in others_X.tolist()])
    if limits.seconds_per_byte or limits.max_bytes < math.inf:
        was_there_SX = _has_SH(division.first_hosts, experts_S, num_hosts)[:, hosts_X]
        was_here_X = np.array([source in division.first_hosts[e] for e in others_X.tolist()])
        sent_SX = np.where(was_there_SX, 0.0, sizes_S[:, None]) + np.where(was_here_X, 0.0, sizes_X)
        is_allowed_SX &= division.bytes_moved + sent_SX <= limits.max_bytes
        value_SX = value_SX - sent_SX * limits.seconds_per_byte
    return [
        _Action(value, int(experts_S[s]), source, int(hosts_X[x]), int(others_X[x]))
        for value, s, x in _largest(value_SX, growth_SX, is_allowed_SX, count)
    ]


def _copies(
    division: Division, source: int, limits: SearchLimits, fixed: AbstractSet[int], count: int
) -> list[_Action]:
    """Return the best further copies of a host's experts on other hosts."""
    problem = division.problem
    num_hosts = len(division.free_H)
    experts: list[int] = []
    for expert, copies in enumerate(division.copies):
        if copies.get(source, 0.0) > 0 and len(copies) < limits.max_copies and expert not in fixed:
            experts.append(expert)
    experts_S = np.array(experts, dtype=np.int64)
    sizes_S = division.bytes_E[experts_S]
    work_LS = division.work_LE[:, experts_S]
    speed_H = division.speed_H
    # The share with which both hosts finish together. Of several loads, each counts as much as the expert
    # weighs in it.
    sooner_LH = division.seconds_LH[:, source, None] - division.seconds_LH
    even_SH = (work_LS[:, :, None] * sooner_LH[:, None, :]).sum(0) / (1 / speed_H[source] + 1 / speed_H)
    squares_S = np.maximum((work_LS**2).sum(0), np.finfo(np.float64).tiny)
    most_S = np.array([division.copies[expert][source] for expert in experts])
    share_SH = np.clip(even_SH / squares_S[:, None], 0.0, most_S[:, None])
    value_SH = _gain(division, source, np.arange(num_hosts), work_LS[:, :, None] * share_SH)

    upkeep_S = np.zeros(len(experts))
    for row, expert in enumerate(experts):
        num_copies = len(division.copies[expert])
        more_rounds = ring_factor(num_copies + 1) - ring_factor(num_copies)
        upkeep_S[row] = problem.sync_seconds[expert] * more_rounds + problem.update_seconds[expert]
    sent_SH = np.where(_has_SH(division.first_hosts, experts_S, num_hosts), 0.0, sizes_S[:, None])
    value_SH = value_SH - upkeep_S[:, None] - sent_SH * limits.seconds_per_byte
    is_allowed_SH = ~_has_SH(division.copies, experts_S, num_hosts)
    is_allowed_SH &= sizes_S[:, None] <= division.free_H
    is_allowed_SH &= division.bytes_moved + sent_SH <= limits.max_bytes
    return [
        _Action(value, experts[s], source, host, is_copy=True)
        for value, s, host in _largest(value_SH, sent_SH, is_allowed_SH, count)
    ]


def _has_SH(hosts_of: Sequence[Collection[int]], experts_S: np.ndarray, num_hosts: int) -> np.ndarray:
    """Return which hosts are among those of each expert."""
    has_SH = np.zeros((len(experts_S), num_hosts), dtype=bool)
    for row, expert in enumerate(experts_S.tolist()):
        has_SH[row, list(hosts_of[expert])] = True
    return has_SH


def _gain(division: Division, source: int, hosts_X: np.ndarray, work_LSX: np.ndarray) -> np.ndarray:
    """Return the mean time won over all loads by giving work from one host to others.

    Times below the mean of all hosts do not count: the layer waits for slower ones."""
    division.budget.spend(_UNITS_PER_CALL + work_LSX.size // _PAIRS_PER_UNIT)
    seconds_LH = division.seconds_LH
    speed_H = division.speed_H
    here_L = seconds_LH[:, source]
    there_LX = seconds_LH[:, hosts_X]
    mean_L = division.mean_L
    before_LX = np.maximum(np.maximum(here_L, mean_L)[:, None], there_LX)
    left_LSX = here_L[:, None, None] - work_LSX / speed_H[source]
    after_LSX = np.maximum(left_LSX, there_LX[:, None, :] + work_LSX / speed_H[hosts_X])
    won_LSX = before_LX[:, None, :] - np.maximum(after_LSX, mean_L[:, None, None])
    return won_LSX[0] if len(won_LSX) == 1 else won_LSX.mean(0)


def _largest(
    value_SX: np.ndarray, growth_SX: np.ndarray, is_allowed_SX: np.ndarray, count: int
) -> list[tuple[float, int, int]]:
    """Return the largest allowed values with their places.

    Of several equal values, the first; where more than one is asked for, one for each growth in bytes, the
    least first: the others are alike."""
    allowed = np.flatnonzero(is_allowed_SX)
    if not len(allowed):
        return []
    values = value_SX.ravel()[allowed]
    order = [int(values.argmax())]
    if count > 1:
        growth = growth_SX.ravel()[allowed]
        sorted_ = np.lexsort((growth, -values))
        differs = (np.diff(values[sorted_]) != 0) | (np.diff(growth[sorted_]) != 0)
        order = sorted_[np.concatenate(([True], differs))][:count].tolist()
    width = value_SX.shape[1]
    return [(float(values[i]), int(allowed[i]) // width, int(allowed[i]) % width) for i in order]
