"""Copies that the load no longer needs."""

from __future__ import annotations

from collections.abc import Sequence

from experts.placement.division import Division, SearchBudget, Shares, resplit
from experts.placement.problem import Problem

_ADJUST_ROUNDS = 3  # after a copy is removed
_AS_GOOD = 1.001  # times an imbalance


def without_needless_copies(
    scenarios: Sequence[Sequence[Problem]], shares: Shares, aim: float, budget: SearchBudget
) -> Shares:
    """Remove the copies without which the hosts reach the aim, or what they reach now.

    That must hold in each scenario, which is one load, or several with the same shares."""
    limits = [max(aim, _worst(problems, shares, budget) * _AS_GOOD) for problems in scenarios]
    first_work = scenarios[0][0].work
    for expert in sorted(range(len(shares)), key=lambda e: (first_work[e], e)):
        while len(shares[expert]) > 1 and not budget.is_spent:
            # Of the copies, one of those with the least share is the most likely to be needless.
            host, _ = min(shares[expert], key=lambda copy: (copy[1], -copy[0]))
            fewer = _without_copy(shares, expert, host)
            pairs = zip(scenarios, limits, strict=True)
            if any(_worst(problems, fewer, budget) > limit for problems, limit in pairs):
                break
            shares = resplit(scenarios[0], fewer, budget)
    return shares


def _worst(problems: Sequence[Problem], shares: Shares, budget: SearchBudget) -> float:
    # A few rounds: the shares were good with one copy more.
    division = Division(problems, shares, budget)
    division.adjust(_ADJUST_ROUNDS)
    return division.excess


def _without_copy(shares: Shares, expert: int, host: int) -> Shares:
    """Divide the share of one copy evenly among the others."""
    left = [copy for copy in shares[expert] if copy[0] != host]
    more = dict(shares[expert])[host] / len(left)
    copies = tuple((each, share + more) for each, share in left)
    return (*shares[:expert], copies, *shares[expert + 1 :])
