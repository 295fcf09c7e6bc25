"""Placement of experts on hosts: the slowest host finishes as early as possible.

Loads are balanced over measured speeds within the memory of each host, so hosts may hold different
numbers of experts and nothing has to divide evenly. Work is counted in whole units, so that sums
are exact in any order: every host and every Python computes the same placement. All functions are
pure; ``search`` does the search."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experts.placement.problem import PROVEN, Problem, bytes_as_work, first_overfull_host, lower_bound
from experts.placement.search import placed

# Units of work of the heaviest expert. Few enough that rounding hides a common factor; less work
# than a unit is none.
_WORK_UNITS = 2**32
_SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class ExpertCost:
    """Expected cost of an expert."""

    work: float
    """FLOPs of the rows expected for it."""
    bytes: float = 0.0
    """Memory of its parameters, gradients and optimizer state."""

    def __post_init__(self) -> None:
        for name, value in (("work", self.work), ("bytes", self.bytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"an expert's {name} is {value}; it must be a number, 0 or more")


@dataclass(frozen=True)
class HostFacts:
    """Speed and memory of a host."""

    speed: float
    """Measured FLOPs per second."""
    memory: float = math.inf
    """Bytes that it may use for experts of all layers together."""
    node: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ValueError(f"a host's speed is {self.speed}; it must be a number above 0")
        if not self.memory >= 0:
            raise ValueError(f"a host's memory is {self.memory}; it must be 0 bytes or more")


@dataclass(frozen=True)
class Placement:
    """The host of each expert, and the expected computing time of each host."""

    host_of: tuple[int, ...]
    seconds: tuple[float, ...]
    bound: float
    """A lower bound: no placement's slowest host takes less."""
    method: str
    mean: float
    """All work over the speed of all hosts."""

    @property
    def slowest(self) -> float:
        """Seconds of the slowest host."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """The slowest host's time as a multiple of the mean."""
        return self.slowest / self.mean if self.mean else 1.0

    @property
    def gap(self) -> float:
        """The slowest host's time above the lower bound, as a fraction of it."""
        return max(0.0, self.slowest / self.bound - 1) if self.bound else 0.0

    def held(self, host: int) -> tuple[int, ...]:
        """Return the experts of a host."""
        return tuple(expert for expert, holder in enumerate(self.host_of) if holder == host)

    def sentence(self) -> str:
        experts = _count(len(self.host_of), "expert")
        hosts = _count(len(self.seconds), "host")
        balance = f"slowest host {self.imbalance:.2f} of the mean"
        if self.method != "exact":
            balance = f"{balance}, {self.gap:.1%} above the lower bound"
        return f"{experts} on {hosts} ({self.method}): {balance}"


class CannotPlace(ValueError):
    """The experts do not fit into the memory of the hosts."""


def place(
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
    used: Sequence[float] = (),
) -> Placement:
    """Return the placement with the fastest slowest host.

    ``used`` are the bytes that other layers took on each host. The method is "exact" where the result
    reaches the lower bound, so that nothing better exists, else "lpt" (longest processing time first, which
    the search begins with). The result is never worse than round robin."""
    problem = _problem(experts, hosts, used)
    _check_total_memory(problem, hosts)
    host_of = placed(problem)
    if host_of is None:
        raise CannotPlace(_no_assignment_text(problem))
    found = _placement(host_of, experts, hosts, "lpt")
    # A result at the lower bound is optimal: no search could improve it.
    return replace(found, method="exact") if found.slowest <= found.bound * PROVEN else found


def round_robin(
    experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float] = ()
) -> Placement:
    """Return the placement of expert ``i`` on host ``i`` modulo the number of hosts."""
    problem = _problem(experts, hosts, used)
    host_of = [expert % len(hosts) for expert in range(len(experts))]
    _check_memory(host_of, problem, hosts)
    return _placement(host_of, experts, hosts, "round_robin")


def placement_of(
    host_of: Sequence[int],
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
    used: Sequence[float] = (),
) -> Placement:
    """Check an assignment that the user gave, and return it as a placement."""
    problem = _problem(experts, hosts, used)
    _check_assignment(host_of, len(experts), len(hosts), "the placement")
    _check_memory(host_of, problem, hosts)
    return _placement(host_of, experts, hosts, "file")


def _problem(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], used: Sequence[float]) -> Problem:
    if not hosts:
        raise ValueError(
            f"{_count(len(experts), 'expert')} cannot be placed on no host; at least one is needed"
        )
    if used and len(used) != len(hosts):
        raise ValueError(f"bytes in use are given for {_count(len(used), 'host')}; there are {len(hosts)}")
    # Without any work the heaviest is zero, which cannot be divided by.
    heaviest = max((expert.work for expert in experts), default=0.0) or 1.0
    work = [float(round(expert.work / heaviest * _WORK_UNITS)) for expert in experts]
    speed = [host.speed for host in hosts]
    used = used or [0.0] * len(hosts)
    memory = [max(0.0, host.memory - taken) for host, taken in zip(hosts, used, strict=True)]
    sizes = [expert.bytes for expert in experts]
    return Problem(work, sizes, speed, memory)


def _placement(
    host_of: Sequence[int], experts: Sequence[ExpertCost], hosts: Sequence[HostFacts], method: str
) -> Placement:
    work_on: list[list[float]] = [[] for _ in hosts]
    for expert, host in zip(experts, host_of, strict=True):
        work_on[host].append(expert.work)
    work = [expert.work for expert in experts]
    speed = [host.speed for host in hosts]
    seconds = tuple(math.fsum(work_on[index]) / host.speed for index, host in enumerate(hosts))
    mean = math.fsum(work) / math.fsum(speed)
    return Placement(tuple(host_of), seconds, lower_bound(work, speed), method, mean)


# --- placement files


def read_placement(
    text: str,
    layers: int,
    experts: Sequence[int],
    hosts: int,
) -> list[tuple[int, ...]]:
    """Read a placement file and return the host of each expert, by layer.

    The file is ``{"host_of": [0, 1, 1]}`` for every layer, or ``{"layers": [[0, 1, 1], [1, 0,
    0]]}`` for each. ``experts`` are the numbers of experts of the layers."""
    content = _parse(text)
    per_layer = [content["host_of"]] * layers if "host_of" in content else content["layers"]
    if not isinstance(per_layer, list) or len(per_layer) != layers:
        actual = _count(len(per_layer), "layer") if isinstance(per_layer, list) else reprlib.repr(per_layer)
        needed = _count(layers, "MoE layer")
        raise ValueError(
            f'the placement file has {actual} under "layers"; the model needs a list of {needed}'
        )
    for layer, (host_of, num_experts) in enumerate(zip(per_layer, experts, strict=True)):
        _check_assignment(host_of, num_experts, hosts, f"layer {layer} of the placement file")
    return [tuple(host_of) for host_of in per_layer]


def check_placement(text: str, hosts: int | None) -> None:
    """Check a placement file before the model is known.

    ``hosts`` is None where their number is not known either."""
    content = _parse(text)
    per_layer = [content["host_of"]] if "host_of" in content else content["layers"]
    if not isinstance(per_layer, list):
        raise ValueError(
            f'the placement file has {reprlib.repr(per_layer)} under "layers"; it needs a list for '
            f"each MoE layer"
        )
    for layer, host_of in enumerate(per_layer):
        where = f"layer {layer} of the placement file"
        if not isinstance(host_of, list):
            raise ValueError(
                f"{where} has {reprlib.repr(host_of)}; it needs a list with a host for each expert"
            )
        _check_hosts(host_of, hosts, where)


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the placement file is not JSON: {str(error)[:80]}") from None
    if isinstance(content, dict) and content.keys() in ({"host_of"}, {"layers"}):
        return content
    is_object = isinstance(content, dict)
    actual = f"the keys {reprlib.repr(sorted(content))}" if is_object else reprlib.repr(content)
    raise ValueError(
        f'the placement file has {actual}; it needs {{"host_of": [...]}} or {{"layers": [[...], ...]}}'
    )


def _check_assignment(host_of: Any, experts: int, hosts: int, where: str) -> None:
    is_sequence = isinstance(host_of, Sequence) and not isinstance(host_of, str)
    if not is_sequence or len(host_of) != experts:
        countable = isinstance(host_of, list | tuple)
        actual = _count(len(host_of), "host number") if countable else reprlib.repr(host_of)
        raise ValueError(f"{where} has {actual}; it needs a list of {experts}, one for each expert")
    _check_hosts(host_of, hosts, where)


def _check_hosts(host_of: Sequence[Any], hosts: int | None, where: str) -> None:
    upper_limit = "" if hosts is None else f" to {hosts - 1}"
    for expert, host in enumerate(host_of):
        # type() and not isinstance(): True is an int too.
        if type(host) is not int or host < 0 or (hosts is not None and host >= hosts):
            raise ValueError(
                f"{where} puts expert {expert} on host {reprlib.repr(host)}; "
                f"hosts are whole numbers from 0{upper_limit}"
            )


# --- memory


def _check_total_memory(problem: Problem, hosts: Sequence[HostFacts]) -> None:
    """Refuse experts that no assignment can hold, before the search."""
    needed = math.fsum(problem.bytes)
    offered = math.fsum(problem.memory)
    if needed > offered:
        raise CannotPlace(f"{_memory_text(problem)}. Use fewer or smaller experts, or more hosts")
    largest = max(range(len(problem.bytes)), key=problem.bytes.__getitem__, default=None)
    widest = max(range(len(hosts)), key=problem.memory.__getitem__)
    if largest is not None and problem.bytes[largest] > problem.memory[widest]:
        raise CannotPlace(
            f"expert {largest} needs {_size(problem.bytes[largest])}; the most memory is "
            f"{_size(problem.memory[widest])}, on {_host_text(widest, hosts)}. Make the experts "
            f"smaller, or use hosts "
            "with more memory"
        )


def _check_memory(
    host_of: Sequence[int],
    problem: Problem,
    hosts: Sequence[HostFacts],
) -> None:
    overfull = first_overfull_host(host_of, problem)
    if overfull:
        host, needed = overfull
        raise CannotPlace(
            f"{_host_text(host, hosts)} would hold experts of {_size(needed)}; it has memory for "
            f"{_size(problem.memory[host])}. Move some of them to other hosts, or have them placed by cost"
        )


def _no_assignment_text(problem: Problem) -> str:
    filling = bytes_as_work(problem)
    proven = lower_bound(filling.work, filling.speed) > PROVEN
    reason = "no division of them among the hosts fits" if proven else "no division that fits was found"
    return f"{_memory_text(problem)}, but {reason}. Leave more memory, or make the experts smaller"


def _memory_text(problem: Problem) -> str:
    experts = _count(len(problem.work), "expert")
    hosts = _count(len(problem.speed), "host")
    needed = _size(math.fsum(problem.bytes))
    return f"{experts} need {needed}; {hosts} have memory for {_size(math.fsum(problem.memory))}"


def _host_text(host: int, hosts: Sequence[HostFacts]) -> str:
    return f"host {host} ({hosts[host].node})" if hosts[host].node else f"host {host}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(num_bytes: float) -> str:
    for unit, size in _SIZE_UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
