"""A fast division of one layer's work: hosts above the mean give what they have too much to the others.

It looks at one expert at a time, where ``search`` compares many, and divides the work of hundreds of experts
among as many hosts within milliseconds. It may send more bytes than needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experts.rebalance.state import (
    BalanceProblem,
    BalanceState,
    SearchBudget,
    Shares,
    excess,
    worst_load,
)

_PASSES = 4  # over all loads
_LEAST = 0.002  # of a host's mean work: less is not worth a copy
_MOST_OF_SURPLUS = 0.5  # an expert with that much of it is moved and not copied
_HOSTS_PER_UNIT = 4  # of the budget: looking at a host takes less than the gain of an action


def spilled_shares(
    problems: Sequence[BalanceProblem], shares: Shares, aim: float, max_copies: int, budget: SearchBudget
) -> Shares:
    """Move and copy experts until no host is above the aim, or none of the others has room.

    The problems differ in the loads. Experts that are hot under one load are seldom hot under another, so
    that one load after the other is spread. All shares are then set for all of them, which shifts each."""
    best = shares
    least = math.inf
    for _ in range(_PASSES):
        for problem in problems:
            state = BalanceState([problem], shares, budget)
            while not budget.is_spent and _spill_once(state, aim, max_copies):
                budget.spend(1 + len(state.free) // _HOSTS_PER_UNIT)
            shares = state.shares
        state = BalanceState(problems, shares, budget)
        state.adjust()
        shares = state.shares
        worst = excess(state, worst_load(state))
        if worst < least:
            best = shares
            least = worst
        if worst <= aim or budget.is_spent:
            break
    return best


def _spill_once(state: BalanceState, aim: float, max_copies: int) -> bool:
    """Relieve the slowest host of one expert or of a part of it; return whether that was possible.

    No other host gets above the mean, so that no work is given twice."""
    if excess(state, 0) <= aim:
        return False
    source = state.slowest(0)
    work = state.works[0]
    mean = state.means[0] * state.problem.speed[source]
    surplus = state.loads[0][source] - mean
    parts = [(work[expert] * state.copies[expert][source], expert) for expert in state.held[source]]
    heaviest_first = sorted(parts, key=lambda part: (-part[0], part[1]))
    for part, expert in heaviest_first:
        is_alone = len(state.copies[expert]) == 1
        if is_alone and _MOST_OF_SURPLUS * surplus <= part <= surplus and _move(state, expert, source):
            return True
    heavy = [expert for part, expert in heaviest_first if part >= _LEAST * mean]
    return any(_give_share(state, expert, source, surplus, max_copies) for expert in heavy)


def _move(state: BalanceState, expert: int, source: int) -> bool:
    host = _roomiest(state, expert, source, may_copy=True)
    if host is None or _room(state, host) < state.works[0][expert]:
        return False
    state.move(expert, source, host)
    return True


def _give_share(state: BalanceState, expert: int, source: int, surplus: float, max_copies: int) -> bool:
    """Give as much of an expert as is too much to the host with the most room."""
    copies = state.copies[expert]
    host = _roomiest(state, expert, source, len(copies) < max_copies)
    if host is None:
        return False
    given = min(surplus, _room(state, host))
    if given < _LEAST * surplus:
        return False
    share = min(copies[source], given / state.works[0][expert])
    if host not in copies:
        state.copy(expert, host)
    state.divide(expert, {source: copies[source] - share, host: copies[host] + share})
    return True


def _roomiest(state: BalanceState, expert: int, source: int, may_copy: bool) -> int | None:
    """Return the host with the most room for an expert; None where none may have it."""
    copies = state.copies[expert]
    size = state.problem.bytes[expert]
    others = (host for host in range(len(state.free)) if host != source)
    allowed = [host for host in others if host in copies or (may_copy and state.free[host] >= size)]
    return max(allowed, key=lambda host: (_room(state, host), -host), default=None)


def _room(state: BalanceState, host: int) -> float:
    """Return the work that a host has less than the mean."""
    return state.means[0] * state.problem.speed[host] - state.loads[0][host]
