"""The search behind ``decisions``: moves, swaps and copies of one layer's experts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experts.copy_costs import ring_factor
from experts.placement.problem import PlacementProblem, lower_bound
from experts.placement.search import relieved
from experts.rebalance.state import (
    BalanceProblem,
    BalanceState,
    SearchBudget,
    Shares,
    excess,
    resplit,
    worst_load,
)

_NUM_NEAR = 8  # hosts that finish first, which are looked at as destinations
_ADJUST_ROUNDS = 3  # after each action
_NUM_SWAPS = 6  # experts of a destination that are looked at in exchange for one
_MOVES_FIRST = 0.7  # of the gain of a copy: a move that gains as much is taken instead
_RELIEF_TRIES = 10_000
_WORK_UNITS = 2**32  # of the heaviest expert
_AS_GOOD = 1.001  # times an imbalance


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search, and the prices of what it does."""

    aim: float
    """The slowest host's time as a multiple of the mean, at which the search ends."""
    moves: bool
    """Whether experts may leave a host. Copies that are added hurt under no loads."""
    max_copies: int
    max_bytes: float
    seconds_per_byte: float
    """The price of a byte that is moved, spread over the steps that it serves."""


def improve(
    problems: Sequence[BalanceProblem], shares: Shares, limits: SearchLimits, budget: SearchBudget
) -> Shares:
    """Move and copy experts until the aim is reached, nothing pays, or bytes or budget are used up.

    The problems differ in the loads; the result suits all of them."""
    state = BalanceState(problems, shares, budget)
    state.settle()
    while not budget.is_spent and _improve_once(state, limits):
        # It looks at all hosts and all experts at least once.
        budget.spend(len(shares) + len(state.free))
    state.settle()
    return state.shares


def relieved_shares(problem: BalanceProblem, shares: Shares) -> Shares:
    """Move experts without copies as the placement at the start of a run does.

    That looks at more combinations, and at no prices."""
    heaviest = max(problem.work) or 1.0
    # In whole units sums are exact in any order.
    work = [float(round(each / heaviest * _WORK_UNITS)) for each in problem.work]
    speed = list(problem.speed)
    memory = list(problem.memory)
    placement = PlacementProblem(work, list(problem.bytes), speed, memory, lower_bound(work, speed))
    host_of = relieved(placement, [copies[0][0] for copies in shares], _RELIEF_TRIES)
    return tuple(((host, 1.0),) for host in host_of)


def without_needless_copies(
    scenarios: Sequence[Sequence[BalanceProblem]], shares: Shares, aim: float, budget: SearchBudget
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


def _worst(problems: Sequence[BalanceProblem], shares: Shares, budget: SearchBudget) -> float:
    # A few rounds: the shares were good with one copy more.
    state = BalanceState(problems, shares, budget)
    state.adjust(_ADJUST_ROUNDS)
    return excess(state, worst_load(state))


def _without_copy(shares: Shares, expert: int, host: int) -> Shares:
    """Divide the share of one copy evenly among the others."""
    left = [copy for copy in shares[expert] if copy[0] != host]
    more = dict(shares[expert])[host] / len(left)
    copies = tuple((each, share + more) for each, share in left)
    return (*shares[:expert], copies, *shares[expert + 1 :])


# --- one improvement


@dataclass(frozen=True)
class _Action:
    """A move, a swap or a copy."""

    value: float
    """Seconds per step that it wins, less what it costs."""
    expert: int
    destination: int
    in_exchange: int | None = None


def _improve_once(state: BalanceState, limits: SearchLimits) -> bool:
    """Relieve the slowest host, and return whether that was possible."""
    load = worst_load(state)
    if excess(state, load) <= limits.aim:
        return False
    source = state.slowest(load)
    move = _best(_moves(state, load, source, limits)) if limits.moves else None
    copy = _best(_copies(state, load, source, limits))
    if copy is not None and (move is None or move.value < _MOVES_FIRST * copy.value):
        state.copy(copy.expert, copy.destination)
    elif move is not None:
        state.move(move.expert, source, move.destination)
        if move.in_exchange is not None:
            state.move(move.in_exchange, move.destination, source)
    else:
        return False
    state.adjust(_ADJUST_ROUNDS)
    return True


def _best(actions: Iterator[_Action]) -> _Action | None:
    best = max(actions, key=lambda action: (action.value, -action.expert, -action.destination), default=None)
    return best if best is not None and best.value > 0 else None


def _destinations(state: BalanceState, load: int, source: int) -> list[int]:
    limit = state.seconds(load, source)
    others = [host for host in range(len(state.free)) if state.seconds(load, host) < limit]
    return sorted(others, key=lambda host: (state.seconds(load, host), host))[:_NUM_NEAR]


def _moves(state: BalanceState, load: int, source: int, limits: SearchLimits) -> Iterator[_Action]:
    """Yield the moves of an expert to another host, alone or in exchange for another expert."""
    work = state.works[load]
    candidates = state.alone(source)
    for host in _destinations(state, load, source):
        others = sorted((work[other], other) for other in state.alone(host))
        for expert in candidates:
            near = _near(others, work[expert] - state.even_transfer(load, source, host))
            for other in (None, *near):
                given = [w[expert] - (w[other] if other is not None else 0.0) for w in state.works]
                gain = _gain(state, source, host, given)
                if gain <= 0 or not _fits(state, expert, other, (source, host)):
                    continue
                price = state.price(expert, host)
                price += state.price(other, source) if other is not None else 0.0
                if state.bytes_moved + price <= limits.max_bytes:
                    yield _Action(gain - price * limits.seconds_per_byte, expert, host, other)


def _near(experts: Sequence[tuple[float, int]], work: float) -> list[int]:
    """Return a few experts whose work is about this; ``experts`` are sorted by work."""
    place = bisect_left(experts, (work, -1))
    begin = max(0, place - _NUM_SWAPS // 2)
    return [expert for _, expert in experts[begin : begin + _NUM_SWAPS]]


def _copies(state: BalanceState, load: int, source: int, limits: SearchLimits) -> Iterator[_Action]:
    """Yield the copies of a host's experts to other hosts."""
    problem = state.problem
    held = sorted(expert for expert in state.held[source] if state.copies[expert][source])
    for host in _destinations(state, load, source):
        for expert in held:
            copies = state.copies[expert]
            price = state.price(expert, host)
            full = len(copies) >= limits.max_copies or state.free[host] < problem.bytes[expert]
            if host in copies or full or state.bytes_moved + price > limits.max_bytes:
                continue
            share = state.even_shares(expert, (source, host), copies[source])[host]
            gain = _gain(state, source, host, [work[expert] * share for work in state.works])
            more_rounds = ring_factor(len(copies) + 1) - ring_factor(len(copies))
            upkeep = problem.sync_seconds[expert] * more_rounds + problem.update_seconds[expert]
            yield _Action(gain - upkeep - price * limits.seconds_per_byte, expert, host)


def _gain(state: BalanceState, source: int, destination: int, given: Sequence[float]) -> float:
    """Return the mean time won over all loads by giving work from one host to another.

    Times below the mean of all hosts do not count: the layer waits for slower ones."""
    state.budget.spend(len(given))
    won = 0.0
    for load, work in enumerate(given):
        before = max(state.seconds(load, source), state.seconds(load, destination), state.means[load])
        left = state.seconds(load, source, -work)
        won += before - max(left, state.seconds(load, destination, work), state.means[load])
    return won / len(given)


def _fits(state: BalanceState, expert: int, other: int | None, hosts: tuple[int, int]) -> bool:
    source, destination = hosts
    sizes = state.problem.bytes
    added = sizes[expert] - (sizes[other] if other is not None else 0.0)
    return state.free[destination] >= added and state.free[source] >= -added
