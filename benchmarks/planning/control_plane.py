"""The cost of decisions as a cluster grows, simulated up to 4,096 hosts and 16,384 experts; and of
real actors here.

Nothing runs on the simulated hosts; only the functions that decide for them do
(``control_plane_stages.py``). Each row of the first table is one of these, each column a size. In
brackets: how the time grows from the size before, as the exponent of the number of hosts (1: in
proportion). Then come as many real host actors as this machine can hold, on their own Ray: they
never import torch.

    python -m benchmarks.planning.control_plane [--largest 4096] [--repeats 3] [--actors 16 32 64 128]
    [--seed 0] [--out FILE]
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.planning.control_plane_stages import (
    STAGES,
    Size,
    Stage,
    costs,
    drifted,
    kinds_of_hosts,
    placing,
    within_half,
)
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.placement.placement import Placement, place, placement_of
from orchestrator.config.settings import Config
from orchestrator.types import GIB, MIB, seconds_text

SMALLEST_HOSTS = 16
GROWTH = 4  # from one size to the next
EXPERTS_PER_HOST = 4
LIMIT_SIZE = (512, 4096)
LIMIT_S = 1.0
RESERVED_BYTES = 4 * GIB  # that no actor may take
CALL_ROUNDS = 5
SHORTEST_S = 0.01  # a shorter time is measured over several repetitions


def sizes(largest: int) -> list[Size]:
    hosts = [SMALLEST_HOSTS]
    while hosts[-1] * GROWTH <= largest:
        hosts.append(hosts[-1] * GROWTH)
    return [Size(count, count * EXPERTS_PER_HOST) for count in hosts]


# --- timing


def seconds_of(stage: Stage, repeats: int) -> float:
    """Return the quickest of the repeats: other processes disturbed it least."""
    often = 1
    while (seconds := _timed(stage, often)) < SHORTEST_S:
        often *= 4
    return min([seconds, *(_timed(stage, often) for _ in range(repeats - 1))]) / often


def _timed(stage: Stage, often: int) -> float:
    begun = time.perf_counter()
    for _ in range(often):
        stage()
    return time.perf_counter() - begun


def measure(every: Sequence[Size], repeats: int, seed: int) -> dict[str, list[float]]:
    """Return the seconds of each stage, one figure for each size."""
    seconds: dict[str, list[float]] = {}
    for size in every:
        for make_stages in STAGES:
            for name, stage in make_stages(size, random.Random(seed)).items():
                seconds.setdefault(name, []).append(seconds_of(stage, repeats))
    return seconds


def growth(seconds: Sequence[float], hosts: Sequence[int]) -> list[float | None]:
    """Return the exponent of the number of hosts by which the time grew, from each size to the next."""
    ratios = [
        math.log(now / before) / math.log(more / fewer)
        for (before, now), (fewer, more) in zip(pairwise(seconds), pairwise(hosts), strict=True)
    ]
    return [None, *ratios]


def growth_table(every: Sequence[Size], measured: dict[str, list[float]]) -> str:
    rows: list[list[object]] = []
    for name, seconds in measured.items():
        exponents = growth(seconds, [size.hosts for size in every])
        cells = [
            seconds_text(value) + (f" ({exponent:.2f})" if exponent is not None else "")
            for value, exponent in zip(seconds, exponents, strict=True)
        ]
        rows.append([name, *cells])
    return markdown_table(["decision", *map(str, every)], rows)


def limit_line(repeats: int, seed: int) -> str:
    """Return whether the slowest placement at the size with a limit stays below it."""
    size = Size(*LIMIT_SIZE)
    stages = placing(size, random.Random(seed))
    seconds = {name: seconds_of(stage, repeats) for name, stage in stages.items()}
    name, slowest = max(seconds.items(), key=lambda item: item[1])
    verdict = "under" if slowest < LIMIT_S else "OVER"
    return (
        f"{size}: {seconds_text(slowest)} at the slowest of {len(seconds)} ({name}): "
        f"{verdict} the {LIMIT_S:g} s asked for.\n"
    )


def drift_table(size: Size, seed: int, times: int = 3) -> str:
    """Return what a new placement gains after the loads have drifted, and how many experts it moves."""
    generator = random.Random(seed)
    hosts = kinds_of_hosts(size.hosts, generator)["three kinds"]
    loads = within_half(size.experts, generator)
    placed = place(costs(loads), hosts)
    rows: list[list[object]] = []
    for number in range(1, times + 1):
        loads = drifted(loads, generator)
        stale = placement_of(placed.host_of, costs(loads), hosts)
        new = place(costs(loads), hosts)
        cells = [f"{stale.imbalance:.2f}", f"{new.imbalance:.2f}", f"{new.bound / new.mean:.2f}"]
        rows.append([number, *cells, f"{moved_share(placed, new):.0%}"])
        placed = new
    columns = [
        f"drift ({size})",
        "slowest / mean before",
        "placed anew",
        "no placement is below",
        "experts on another host",
    ]
    return markdown_table(columns, rows)


def moved_share(before: Placement, after: Placement) -> float:
    pairs = zip(before.host_of, after.host_of, strict=True)
    return sum(old != new for old, new in pairs) / len(after.host_of)


# --- real actors


class IdleWorker:
    """Work that is done at once."""

    def run_segment(self, segment: int) -> int:
        return segment


@contextmanager
def idle_worker() -> Iterator[IdleWorker]:
    yield IdleWorker()


def actors_table(counts: Sequence[int]) -> str:
    """Start host actors in portions, until the next one would leave too little memory."""
    from orchestrator.runtime.cluster.session import session

    rows: list[list[object]] = []
    actors: list[Any] = []
    begun = time.perf_counter()
    with session(Config.of(ray_address="local", gpu_mode="cpu"), print):
        ray_s = time.perf_counter() - begun
        actor_bytes = 100.0 * MIB  # a guess; replaced by the measured value where that is larger
        for count in counts:
            free = psutil.virtual_memory().available
            if free - (count - len(actors)) * actor_bytes < RESERVED_BYTES:
                reason = f"not started: {free / GIB:.1f} GiB are free, {RESERVED_BYTES / GIB:.0f} are to stay"
                rows.append([count, *["–"] * 5, reason])
                break
            row, measured_bytes = start_up_to(count, actors)
            actor_bytes = max(measured_bytes, actor_bytes)
            rows.append(row)
    columns = [
        "hosts",
        "started",
        "s",
        "s per host",
        "MiB per host",
        "a round of calls, ms",
        "free afterwards",
    ]
    return f"Ray itself was up after {ray_s:.1f} s.\n\n" + markdown_table(columns, rows)


def start_up_to(count: int, actors: list[Any]) -> tuple[list[object], float]:
    """Start the actors that are missing to ``count``, then call all.

    Returns the row, and the bytes of one actor.
    """
    import ray

    from experts.hosts.actor_host import ExpertHost

    bytes_before = own_bytes()
    num_new = count - len(actors)
    host: Any = ExpertHost
    begun = time.perf_counter()
    # no CPU each: this machine has fewer cores than actors
    started = [host.options(num_cpus=0).remote() for _ in range(num_new)]
    ray.get([actor.open.remote(idle_worker) for actor in started])
    seconds = time.perf_counter() - begun
    actors += started
    actor_bytes = (own_bytes() - bytes_before) / num_new
    rounds = [
        _timed(lambda: ray.get([actor.run_segment.remote(1) for actor in actors]), 1)
        for _ in range(CALL_ROUNDS)
    ]
    cells = [
        f"{seconds:.1f}",
        f"{seconds / num_new:.2f}",
        f"{actor_bytes / MIB:.0f}",
        f"{1e3 * statistics.median(rounds):.0f}",
        f"{psutil.virtual_memory().available / GIB:.1f} GiB",
    ]
    return [count, num_new, *cells], actor_bytes


def own_bytes() -> float:
    """Return the memory that the children of this process do not share with others."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--largest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    every = sizes(arguments.largest)
    parts = [
        growth_table(every, measure(every, arguments.repeats, arguments.seed)),
        limit_line(arguments.repeats, arguments.seed),
        drift_table(every[-1], arguments.seed),
    ]
    if arguments.actors:
        parts.append(actors_table(sorted(arguments.actors)))
    text = header("The control plane as a cluster grows", arguments) + "\n".join(parts)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
