"""Which host holds which expert: the assignment whose slowest host is done first, within the memory of each. Pure.

Loads are balanced over measured speeds, so hosts may hold different numbers of experts and nothing has to divide evenly.
Work is counted in whole units, so sums are exact in any order: every host and every Python comes to the same placement.
``placement_search`` looks for it.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experts.placement_search import CLOSE, PROVEN, Search, Task, heuristic, lower_bound, overfull

_UNITS = (
    2**32
)  # of work, in the heaviest expert: coarse enough to hide the rounding of a common factor, and what is below is none
_SMALL = 24  # experts; with more the search over all hosts rarely ends
_SEARCH_TRIES = 50_000  # hosts tried for an expert by the whole search: about half a second


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
    best, limit = heuristic(task)
    proven = limit <= task.bound * PROVEN
    if not proven and len(experts) <= _SMALL:
        search = Search(task, limit, _SEARCH_TRIES if limit > task.bound * CLOSE else _SEARCH_TRIES // 10)
        best, proven = search.best or best, search.tries > 0
    if best is None:
        raise CannotPlace(_no_division(task, proven))
    return _placement(best, experts, hosts, "exact" if proven else "lpt")


def round_robin(
    experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float] = ()
) -> Placement:
    """Expert ``i`` on host ``i`` modulo the number of hosts, whatever it costs."""
    task = _task(experts, hosts, used)
    host_of = [expert % len(hosts) for expert in range(len(experts))]
    _check_memory(host_of, task, hosts)
    return _placement(host_of, experts, hosts, "round_robin")


def given(
    host_of: Sequence[int],
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
    used: Sequence[float] = (),
) -> Placement:
    """An assignment made by someone else, checked."""
    task = _task(experts, hosts, used)
    _check_ids(host_of, len(experts), len(hosts), "the placement")
    _check_memory(host_of, task, hosts)
    return _placement(host_of, experts, hosts, "file")


def read_placement(text: str, layers: int, experts: Sequence[int], hosts: int) -> list[tuple[int, ...]]:
    """A placement file: ``{"host_of": [0, 1, 1]}`` for every layer, or ``{"layers": [[0, 1, 1], [1, 0, 0]]}`` for each.
    ``experts`` are the numbers of experts of the layers."""
    found = _parsed(text)
    per_layer = [found["host_of"]] * layers if "host_of" in found else found["layers"]
    if not isinstance(per_layer, list) or len(per_layer) != layers:
        what = _counted(len(per_layer), "layer") if isinstance(per_layer, list) else reprlib.repr(per_layer)
        raise ValueError(
            f'the placement file has {what} under "layers"; the model needs a list of {_counted(layers, "MoE layer")}'
        )
    for layer, (host_of, count) in enumerate(zip(per_layer, experts, strict=True)):
        _check_ids(host_of, count, hosts, f"layer {layer} of the placement file")
    return [tuple(host_of) for host_of in per_layer]


def check_placement(text: str, hosts: int | None) -> None:
    """What can be said of a placement file before the model is known; ``hosts`` is None where their number is not known either."""
    found = _parsed(text)
    per_layer = [found["host_of"]] if "host_of" in found else found["layers"]
    if not isinstance(per_layer, list):
        raise ValueError(
            f'the placement file has {reprlib.repr(per_layer)} under "layers"; it needs a list for each MoE layer'
        )
    for layer, host_of in enumerate(per_layer):
        where = f"layer {layer} of the placement file"
        if not isinstance(host_of, list):
            raise ValueError(
                f"{where} has {reprlib.repr(host_of)}; it needs a list with a host for each expert"
            )
        _check_hosts(host_of, hosts, where)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the placement file is not JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict) or found.keys() not in ({"host_of"}, {"layers"}):
        what = f"the keys {reprlib.repr(sorted(found))}" if isinstance(found, dict) else reprlib.repr(found)
        raise ValueError(
            f'the placement file has {what}; it needs {{"host_of": [...]}} or {{"layers": [[...], ...]}}'
        )
    return found


# --- what is to be placed


def _task(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float]) -> Task:
    if not hosts:
        raise ValueError(
            f"{_counted(len(experts), 'expert')} cannot be placed on no host; at least one is needed"
        )
    if used and len(used) != len(hosts):
        raise ValueError(f"bytes in use are given for {_counted(len(used), 'host')}; there are {len(hosts)}")
    heaviest = max((expert.work for expert in experts), default=0.0) or 1.0
    work, speed = (
        [float(round(expert.work / heaviest * _UNITS)) for expert in experts],
        [host.speed for host in hosts],
    )
    room = [
        max(0.0, host.memory - taken) for host, taken in zip(hosts, used or [0.0] * len(hosts), strict=True)
    ]
    return Task(work, [expert.bytes for expert in experts], speed, room, lower_bound(work, speed))


def _placement(
    host_of: Sequence[int], experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], method: str
) -> Placement:
    shares: list[list[float]] = [[] for _ in hosts]
    for expert, host in zip(experts, host_of, strict=True):
        shares[host].append(expert.work)
    work, speed = [expert.work for expert in experts], [host.speed for host in hosts]
    seconds = tuple(math.fsum(share) / host.speed for share, host in zip(shares, hosts, strict=True))
    return Placement(
        tuple(host_of), seconds, lower_bound(work, speed), method, math.fsum(work) / math.fsum(speed)
    )


# --- checks and words


def _check_room(task: Task, hosts: Sequence[HostFacts]) -> None:
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


def _check_memory(host_of: Sequence[int], task: Task, hosts: Sequence[HostFacts]) -> None:
    found = overfull(host_of, task)
    if found:
        host, needed = found
        raise CannotPlace(
            f"{_named(host, hosts)} would hold experts of {_size(needed)}; it has room for {_size(task.room[host])}. "
            "Move some of them elsewhere, or have them placed by cost"
        )


def _no_division(task: Task, proven: bool) -> str:
    experts, hosts = _counted(len(task.work), "expert"), _counted(len(task.speed), "host")
    what = "no division of them among the hosts fits" if proven else "no division that fits was found"
    return (
        f"{experts} need {_size(math.fsum(task.bytes))}; {hosts} have room for {_size(math.fsum(task.room))}, but {what}. "
        "Leave more room, or make the experts smaller"
    )


def _check_ids(host_of: Any, experts: int, hosts: int, where: str) -> None:
    if not isinstance(host_of, Sequence) or isinstance(host_of, str) or len(host_of) != experts:
        what = (
            _counted(len(host_of), "host number")
            if isinstance(host_of, list | tuple)
            else reprlib.repr(host_of)
        )
        raise ValueError(f"{where} has {what}; it needs a list of {experts}, one for each expert")
    _check_hosts(host_of, hosts, where)


def _check_hosts(host_of: Sequence[Any], hosts: int | None, where: str) -> None:
    for expert, host in enumerate(host_of):
        if type(host) is not int or host < 0 or (hosts is not None and host >= hosts):
            most = "" if hosts is None else f" to {hosts - 1}"
            raise ValueError(
                f"{where} puts expert {expert} on host {reprlib.repr(host)}; hosts are whole numbers from 0{most}"
            )


def _named(host: int, hosts: Sequence[HostFacts]) -> str:
    return f"host {host} ({hosts[host].node})" if hosts[host].node else f"host {host}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
