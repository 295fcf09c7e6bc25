"""What placing experts by cost and speed gains over the simple rules: predicted time of the slowest host, as a ratio to ours.

Loads fall off as in Zipf's law over the experts in random order; sizes are one hidden size, or three in turn. Pure
arithmetic: nothing is run on the hosts. Small cases are compared with every assignment there is.

    python -m benchmarks.placement [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import header, markdown_table, write_result
from experts.placement import ExpertCost, HostFacts, Placement, place, placement_of, round_robin

HOSTS = {"3 hosts, 1:2:4": (1, 2, 4), "7 hosts, 1:2:4": (1, 1, 2, 2, 4, 4, 4), "8 hosts, equal": (1,) * 8}
EXPERTS = (8, 16, 32, 64, 128, 256)
SIZES = {"one": (1,), "three": (1, 2, 4)}
SMALL = ((6, (1, 2, 4)), (7, (1, 4)), (8, (1, 2, 4)), (6, (1, 2, 4, 4)), (10, (1, 1.9)))
Case = tuple[list[ExpertCost], list[HostFacts]]


def zipf(count: int, sizes: Sequence[int], speeds: Sequence[float], draw: random.Random) -> Case:
    rows = [1 / (rank + 1) ** 0.8 for rank in range(count)]
    draw.shuffle(rows)
    return [ExpertCost(rows[e] * sizes[e % len(sizes)]) for e in range(count)], [
        HostFacts(speed) for speed in speeds
    ]


def contiguous(experts: list[ExpertCost], hosts: list[HostFacts]) -> Placement:
    return placement_of([expert * len(hosts) // len(experts) for expert in range(len(experts))], experts, hosts)


def equal_counts(experts: list[ExpertCost], hosts: list[HostFacts]) -> Placement:
    """As EPLB packs: the heaviest first, to the least loaded host that does not yet hold its share; speeds do not count."""
    share, host_of = -(-len(experts) // len(hosts)), [0] * len(experts)
    load, held = [0.0] * len(hosts), [0] * len(hosts)
    for expert in sorted(range(len(experts)), key=lambda e: -experts[e].work):
        host = min((h for h in range(len(hosts)) if held[h] < share), key=load.__getitem__)
        host_of[expert] = host
        load[host] += experts[expert].work
        held[host] += 1
    return placement_of(host_of, experts, hosts)


def optimum(experts: list[ExpertCost], hosts: list[HostFacts]) -> float:
    every = itertools.product(range(len(hosts)), repeat=len(experts))
    return min(placement_of(host_of, experts, hosts).slowest for host_of in every)


def compared(seed: int) -> str:
    rows: list[list[object]] = []
    for (name, speeds), count, (sizes, factors) in itertools.product(HOSTS.items(), EXPERTS, SIZES.items()):
        case = zipf(count, factors, speeds, random.Random(seed))
        ours = place(*case)
        others = (contiguous(*case), equal_counts(*case), round_robin(*case))
        ratios = [f"{other.slowest / ours.slowest:.2f}" for other in others]
        rows.append(
            [
                name,
                count,
                sizes,
                ours.method,
                f"{ours.imbalance:.3f}",
                "1",
                *ratios,
                f"{ours.bound / ours.slowest:.4f}",
            ]
        )
    columns = [
        "hosts",
        "experts",
        "sizes",
        "method",
        "slowest / mean",
        "ours",
        "contiguous",
        "equal counts",
        "round robin",
        "lower bound",
    ]
    return markdown_table(columns, rows)


def enumerated(seed: int, draws: int = 10) -> str:
    rows: list[list[object]] = []
    for count, speeds in SMALL:
        cases = [zipf(count, (1, 2, 4), speeds, random.Random(seed + draw)) for draw in range(draws)]
        found = [(place(*case), optimum(*case)) for case in cases]
        gaps = [ours.slowest / best - 1 for ours, best in found]
        bounds = [best / ours.bound - 1 for ours, best in found]
        exact = sum(ours.method == "exact" for ours, _ in found)
        speeds_text = ":".join(f"{speed:g}" for speed in speeds)
        rows.append(
            [
                count,
                speeds_text,
                f"{len(speeds) ** count:,}",
                f"{exact} of {draws}",
                f"{abs(max(gaps)):.2%}",
                f"{statistics.mean(bounds):.1%}",
            ]
        )
    return markdown_table(
        [
            "experts",
            "speeds",
            "assignments",
            "exact",
            "ours above the optimum, worst",
            "optimum above the bound, mean",
        ],
        rows,
    )


def timed(seed: int, experts: int = 4096, hosts: int = 512) -> str:
    draw, rows = random.Random(seed), []
    speeds = [draw.choice([1, 2, 4]) * draw.uniform(0.95, 1.05) for _ in range(hosts)]
    loads = {
        "even within half": [draw.uniform(0.5, 1.5) for _ in range(experts)],
        "Zipf": [1 / (rank + 1) ** 0.8 for rank in range(experts)],
        "equal": [1.0] * experts,
    }
    for name, works in loads.items():
        case = [ExpertCost(work) for work in works], [HostFacts(speed) for speed in speeds]
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            place(*case)
            seconds.append(time.perf_counter() - begun)
        rows.append(
            [name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{place(*case).gap:.2%}"]
        )
    return markdown_table(
        [f"loads ({experts:,} experts, {hosts} hosts)", "median s", "slowest s", "above the lower bound"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parts = [compared(arguments.seed), enumerated(arguments.seed), timed(arguments.seed)]
    text = header("Placing experts by cost and speed", arguments) + "\n".join(parts)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
