"""The search behind ``rebalance``: moves, swaps and copies of one layer's experts, and their shares.

The time of a host is the work of its experts over its speed; the layer waits for the slowest host. Copies
divide the work of an expert among hosts in any shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ROUNDS = 30  # over all copied experts, until their shares are settled
_SETTLED = 1e-5  # of the mean time of the hosts
_NUM_NEAR = 8  # hosts that finish first, which are looked at as destinations
_AS_GOOD = 1.001  # times an imbalance
_MOVES_FIRST = 0.7  # of the gain of a copy: a move that gains as much is taken instead

_Copies = tuple[tuple[int, float], ...]
Shares = tuple[_Copies, ...]
"""The hosts of each expert in ascending order, with the shares of its tokens, which sum to 1."""


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


@dataclass(frozen=True)
class BalanceProblem:
    """The work of one layer's experts, and the hosts."""

    work: tuple[float, ...]
    """FLOPs per step of each expert."""
    bytes: tuple[float, ...]
    """State of each expert."""
    sync_seconds: tuple[float, ...]
    """Seconds per step that each expert's copies need to sum their gradients."""
    speed: tuple[float, ...]
    memory: tuple[float, ...]
    """Bytes of each host that other layers leave."""

    @property
    def mean(self) -> float:
        """Seconds per step of all hosts, were the work divided evenly."""
        return math.fsum(self.work) / math.fsum(self.speed)


def host_seconds(problem: BalanceProblem, shares: Shares) -> list[float]:
    """Return the time of each host."""
    load = [0.0] * len(problem.speed)
    for work, copies in zip(problem.work, shares, strict=True):
        for host, share in copies:
            load[host] += work * share
    return [each / speed for each, speed in zip(load, problem.speed, strict=True)]


def imbalance(problem: BalanceProblem, shares: Shares) -> float:
    """Return the slowest host's time as a multiple of the mean; 1 where there is no work."""
    return max(host_seconds(problem, shares)) / problem.mean if problem.mean else 1.0


def sync_seconds(problem: BalanceProblem, shares: Shares) -> float:
    """Return the seconds per step that the busiest host sums gradients of copies."""
    busy = [0.0] * len(problem.speed)
    for seconds, copies in zip(problem.sync_seconds, shares, strict=True):
        for host, _ in copies:
            # A ring sums and distributes: each copy sends this part of the gradient, twice.
            busy[host] += seconds * 2 * (len(copies) - 1) / len(copies)
    return max(busy)


def resplit(problem: BalanceProblem, shares: Shares) -> Shares:
    """Give the copies the shares with which the slowest host is fastest."""
    state = _State(problem, shares)
    state.settle()
    return state.shares


def improve(problem: BalanceProblem, shares: Shares, limits: SearchLimits) -> Shares:
    """Move and copy experts until the aim is reached, or nothing pays, or the bytes are used up."""
    state = _State(problem, shares)
    state.settle()
    for _ in range(4 * (len(shares) + len(problem.speed))):
        if state.slowest <= limits.aim * problem.mean or not _improve_once(state, limits):
            break
    return state.shares


def without_needless_copies(problems: Sequence[BalanceProblem], shares: Shares, aim: float) -> Shares:
    """Remove the copies without which the hosts reach the aim, or what they reach now.

    That must hold under the loads of each of the problems."""
    reached = [imbalance(problem, resplit(problem, shares)) for problem in problems]
    limits = [max(aim, each * _AS_GOOD) for each in reached]
    for expert in sorted(range(len(shares)), key=lambda e: problems[0].work[e]):
        while len(shares[expert]) > 1:
            fewer = _without_one_copy(problems, limits, shares, expert)
            if fewer is None:
                break
            shares = fewer
    return shares


def _without_one_copy(
    problems: Sequence[BalanceProblem], limits: Sequence[float], shares: Shares, expert: int
) -> Shares | None:
    for host, _ in sorted(shares[expert], key=lambda copy: (copy[1], -copy[0])):
        left = _without_host(shares[expert], host)
        fewer = tuple(left if index == expert else copies for index, copies in enumerate(shares))
        pairs = zip(problems, limits, strict=True)
        if all(imbalance(problem, resplit(problem, fewer)) <= limit for problem, limit in pairs):
            return resplit(problems[0], fewer)
    return None


def _without_host(copies: _Copies, host: int) -> _Copies:
    """Divide the share of one copy evenly among the others."""
    left = [copy for copy in copies if copy[0] != host]
    more = dict(copies)[host] / len(left)
    return tuple((each, share + more) for each, share in left)


class _State:
    """A division of the work among hosts that changes: loads, free memory and the experts of hosts."""

    def __init__(self, problem: BalanceProblem, shares: Shares) -> None:
        self.problem = problem
        self.copies = [dict(copies) for copies in shares]
        self.first_hosts = [frozenset(copies) for copies in self.copies]
        self.load = [0.0] * len(problem.speed)
        self.free = list(problem.memory)
        self.bytes_moved = 0.0
        for expert, copies in enumerate(self.copies):
            for host, share in copies.items():
                self.load[host] += problem.work[expert] * share
                self.free[host] -= problem.bytes[expert]

    @property
    def shares(self) -> Shares:
        return tuple(tuple(sorted(copies.items())) for copies in self.copies)

    @property
    def slowest(self) -> float:
        return max(self.seconds(host) for host in range(len(self.load)))

    def seconds(self, host: int, more_work: float = 0.0) -> float:
        return (self.load[host] + more_work) / self.problem.speed[host]

    def price(self, expert: int, host: int) -> float:
        """Return the bytes that reach a host with an expert: none where it was at first."""
        return 0.0 if host in self.first_hosts[expert] else self.problem.bytes[expert]

    def alone(self, host: int) -> list[int]:
        """Return the experts of a host that have no other copy."""
        return [e for e, copies in enumerate(self.copies) if len(copies) == 1 and host in copies]

    def move(self, expert: int, source: int, destination: int) -> None:
        self._add(expert, destination, self.copies[expert][source])
        self.load[source] -= self.problem.work[expert] * self.copies[expert].pop(source)
        self.free[source] += self.problem.bytes[expert]

    def copy(self, expert: int, destination: int) -> None:
        self._add(expert, destination, 0.0)
        self.settle()

    def _add(self, expert: int, host: int, share: float) -> None:
        self.bytes_moved += self.price(expert, host)
        self.copies[expert][host] = share
        self.load[host] += self.problem.work[expert] * share
        self.free[host] -= self.problem.bytes[expert]

    def settle(self) -> None:
        """Divide each copied expert so that its hosts finish together, in turn until all do.

        Each turn lowers the sum of squared times, whose minimum is also that of the slowest time.
        Equal shares at the beginning: where several divisions are as good, the most even one
        stands other loads best."""
        copied = [expert for expert, copies in enumerate(self.copies) if len(copies) > 1]
        for expert in copied:
            total_speed = sum(self.problem.speed[host] for host in self.copies[expert])
            even = {host: self.problem.speed[host] / total_speed for host in self.copies[expert]}
            self._divide(expert, even)
        for _ in range(_ROUNDS):
            changes = [self._divide(expert, self._filled(expert)) for expert in copied]
            if max(changes, default=0.0) <= _SETTLED * self.problem.mean:
                break

    def _divide(self, expert: int, shares: dict[int, float]) -> float:
        """Set the shares of an expert's copies and return the largest change of a host's time."""
        work = self.problem.work[expert]
        largest = 0.0
        for host, share in shares.items():
            change = work * (share - self.copies[expert][host])
            self.load[host] += change
            largest = max(largest, abs(change) / self.problem.speed[host])
        self.copies[expert] = shares
        return largest

    def _filled(self, expert: int) -> dict[int, float]:
        """Return the shares with which the hosts of an expert finish together.

        A host that is busy longer with other experts gets nothing."""
        work = self.problem.work[expert]
        copies = self.copies[expert]
        if not work:
            return copies
        speed = self.problem.speed
        others = {host: self.load[host] - work * share for host, share in copies.items()}
        level = _water_level(work, [(others[host], speed[host]) for host in copies])
        parts = {host: max(0.0, level * speed[host] - others[host]) for host in copies}
        total = sum(parts.values())
        return {host: part / total for host, part in parts.items()}


def _water_level(work: float, hosts: list[tuple[float, float]]) -> float:
    """Return the time at which hosts with some (load, speed) finish ``work`` more together."""
    load_sum = work
    speed_sum = 0.0
    level = math.inf
    for load, speed in sorted(hosts, key=lambda host: host[0] / host[1]):
        if load / speed >= level:
            break
        load_sum += load
        speed_sum += speed
        level = load_sum / speed_sum
    return level


# --- one improvement


@dataclass(frozen=True)
class _Action:
    """A move, a swap or a copy. The best one has the greatest value."""

    value: float
    """Seconds by which the slower of the two hosts gets faster, less what the action costs."""
    expert: int
    destination: int
    in_exchange: int | None = None
    is_copy: bool = False


def _improve_once(state: _State, limits: SearchLimits) -> bool:
    source = max(range(len(state.load)), key=lambda host: (state.seconds(host), -host))
    moves = _best(_moves(state, source, limits)) if limits.moves else None
    copies = _best(_copies(state, source, limits))
    action = moves
    if copies is not None and (moves is None or moves.value < _MOVES_FIRST * copies.value):
        action = copies
    if action is None:
        return False
    if action.is_copy:
        state.copy(action.expert, action.destination)
        return True
    state.move(action.expert, source, action.destination)
    if action.in_exchange is not None:
        state.move(action.in_exchange, action.destination, source)
    state.settle()
    return True


def _best(actions: Iterator[_Action]) -> _Action | None:
    best = max(actions, key=lambda action: (action.value, -action.expert, -action.destination), default=None)
    return best if best is not None and best.value > 0 else None


def _destinations(state: _State, source: int) -> list[int]:
    others = [host for host in range(len(state.load)) if state.seconds(host) < state.seconds(source)]
    return sorted(others, key=lambda host: (state.seconds(host), host))[:_NUM_NEAR]


def _moves(state: _State, source: int, limits: SearchLimits) -> Iterator[_Action]:
    """Yield the moves of an expert to another host, alone or in exchange for another expert."""
    work = state.problem.work
    candidates = state.alone(source)
    for host in _destinations(state, source):
        others = (None, *state.alone(host))
        for expert in candidates:
            for other in others:
                given = work[expert] - (work[other] if other is not None else 0.0)
                after = max(state.seconds(source, -given), state.seconds(host, given))
                gain = state.seconds(source) - after
                if gain > 0 and _fits(state, expert, other, (source, host)):
                    price = state.price(expert, host)
                    price += state.price(other, source) if other is not None else 0.0
                    if state.bytes_moved + price <= limits.max_bytes:
                        yield _Action(gain - price * limits.seconds_per_byte, expert, host, other)


def _fits(state: _State, expert: int, other: int | None, hosts: tuple[int, int]) -> bool:
    source, destination = hosts
    sizes = state.problem.bytes
    freed = sizes[other] if other is not None else 0.0
    added = sizes[expert] - freed
    return state.free[destination] >= added and state.free[source] >= -added


def _copies(state: _State, source: int, limits: SearchLimits) -> Iterator[_Action]:
    """Yield the copies of the slowest host's experts to other hosts."""
    problem = state.problem
    for host in _destinations(state, source):
        for expert, copies in enumerate(state.copies):
            if source not in copies or host in copies or len(copies) >= limits.max_copies:
                continue
            price = state.price(expert, host)
            fits = state.free[host] >= problem.bytes[expert]
            if not fits or state.bytes_moved + price > limits.max_bytes:
                continue
            work = problem.work[expert] * copies[source]
            after = max(
                _water_level(work, [_load_without(state, source, work), _load_without(state, host, 0.0)]),
                state.seconds(source, -work),
            )
            cost = price * limits.seconds_per_byte + _more_sync(problem.sync_seconds[expert], len(copies))
            yield _Action(state.seconds(source) - after - cost, expert, host, is_copy=True)


def _load_without(state: _State, host: int, work: float) -> tuple[float, float]:
    return max(0.0, state.load[host] - work), state.problem.speed[host]


def _more_sync(seconds: float, copies: int) -> float:
    """Return the seconds by which another copy lengthens the sum of an expert's gradients."""
    before = 2 * (copies - 1) / copies
    return seconds * (2 * copies / (copies + 1) - before)
