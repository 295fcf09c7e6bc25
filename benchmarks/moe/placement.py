"""The gain of placing experts by cost and speed over simple rules: predicted time of the slowest
host, relative to ours.

Loads follow Zipf's law over the experts in random order; sizes are one hidden size, or three in
turn. Pure arithmetic: nothing runs on the hosts. Small cases are compared with every possible
assignment.

    python -m benchmarks.moe.placement [--seed 0] [--out FILE]
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.placement.placement import ExpertCost, HostFacts, Placement, place, placement_of, round_robin

HOSTS = {"3 hosts, 1:2:4": (1, 2, 4), "7 hosts, 1:2:4": (1, 1, 2, 2, 4, 4, 4), "8 hosts, equal": (1,) * 8}
EXPERTS = (8, 16, 32, 64, 128, 256)
SIZES = {"one": (1,), "three": (1, 2, 4)}
SMALL = ((6, (1, 2, 4)), (7, (1, 4)), (8, (1, 2, 4)), (6, (1, 2, 4, 4)), (10, (1, 1.9)))
"""Numbers of experts and speeds of the hosts, few enough to try every assignment."""
TIMED_ROUNDS = 5
Case = tuple[list[ExpertCost], list[HostFacts]]


def zipf(count: int, sizes: Sequence[int], speeds: Sequence[float], generator: random.Random) -> Case:
    """Return experts with loads by Zipf's law, and hosts of these speeds."""
    rows = [1 / (rank + 1) ** 0.8 for rank in range(count)]
    generator.shuffle(rows)
    experts = [ExpertCost(rows[expert] * sizes[expert % len(sizes)]) for expert in range(count)]
    return experts, [HostFacts(speed) for speed in speeds]


def contiguous(experts: list[ExpertCost], hosts: list[HostFacts]) -> Placement:
    """Give each host the same number of neighbouring experts."""
    host_of = [expert * len(hosts) // len(experts) for expert in range(len(experts))]
    return placement_of(host_of, experts, hosts)


def equal_counts(experts: list[ExpertCost], hosts: list[HostFacts]) -> Placement:
    """Place as EPLB does: the heaviest expert first, on the least loaded host that is not full.

    Speeds do not count.
    """
    share = -(-len(experts) // len(hosts))
    host_of = [0] * len(experts)
    load = [0.0] * len(hosts)
    num_held = [0] * len(hosts)
    for expert in sorted(range(len(experts)), key=lambda index: -experts[index].work):
        free = [host for host in range(len(hosts)) if num_held[host] < share]
        host = min(free, key=load.__getitem__)
        host_of[expert] = host
        load[host] += experts[expert].work
        num_held[host] += 1
    return placement_of(host_of, experts, hosts)


def optimum(experts: list[ExpertCost], hosts: list[HostFacts]) -> float:
    """Return the time of the slowest host under the best of all assignments."""
    every = itertools.product(range(len(hosts)), repeat=len(experts))
    return min(placement_of(host_of, experts, hosts).slowest for host_of in every)


def rules_table(seed: int) -> str:
    """Compare our placement with simple rules."""
    rows: list[list[object]] = []
    for (name, speeds), count, (sizes, factors) in itertools.product(HOSTS.items(), EXPERTS, SIZES.items()):
        case = zipf(count, factors, speeds, random.Random(seed))
        ours = place(*case)
        others = (contiguous(*case), equal_counts(*case), round_robin(*case))
        ratios = [f"{other.slowest / ours.slowest:.2f}" for other in others]
        bound = f"{ours.bound / ours.slowest:.4f}"
        rows.append([name, count, sizes, ours.method, f"{ours.imbalance:.3f}", "1", *ratios, bound])
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


def optimum_table(seed: int, draws: int) -> str:
    """Compare our placement with the optimum, on cases small enough to try everything."""
    rows: list[list[object]] = []
    for count, speeds in SMALL:
        cases = [zipf(count, (1, 2, 4), speeds, random.Random(seed + draw)) for draw in range(draws)]
        results = [(place(*case), optimum(*case)) for case in cases]
        gaps = [ours.slowest / best - 1 for ours, best in results]
        bounds = [best / ours.bound - 1 for ours, best in results]
        num_exact = sum(ours.method == "exact" for ours, _ in results)
        rows.append(
            [
                count,
                ":".join(f"{speed:g}" for speed in speeds),
                f"{len(speeds) ** count:,}",
                f"{num_exact} of {draws}",
                f"{abs(max(gaps)):.2%}",
                f"{statistics.mean(bounds):.1%}",
            ]
        )
    columns = [
        "experts",
        "speeds",
        "assignments",
        "exact",
        "ours above the optimum, worst",
        "optimum above the bound, mean",
    ]
    return markdown_table(columns, rows)


def time_table(seed: int, num_experts: int, num_hosts: int) -> str:
    """Time the placement at a large size."""
    generator = random.Random(seed)
    speeds = [generator.choice([1, 2, 4]) * generator.uniform(0.95, 1.05) for _ in range(num_hosts)]
    hosts = [HostFacts(speed) for speed in speeds]
    loads = {
        "even within half": [generator.uniform(0.5, 1.5) for _ in range(num_experts)],
        "Zipf": [1 / (rank + 1) ** 0.8 for rank in range(num_experts)],
        "equal": [1.0] * num_experts,
    }
    rows: list[list[object]] = []
    for name, works in loads.items():
        experts = [ExpertCost(work) for work in works]
        seconds = []
        for _ in range(TIMED_ROUNDS):
            begun = time.perf_counter()
            place(experts, hosts)
            seconds.append(time.perf_counter() - begun)
        gap = place(experts, hosts).gap
        rows.append([name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{gap:.2%}"])
    columns = [
        f"loads ({num_experts:,} experts, {num_hosts} hosts)",
        "median s",
        "slowest s",
        "above the lower bound",
    ]
    return markdown_table(columns, rows)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10, help="loads that are compared with the optimum")
    parser.add_argument("--largest", type=int, nargs=2, default=[4096, 512], help="experts and hosts to time")
    arguments = parser.parse_args()
    tables = [
        rules_table(arguments.seed),
        optimum_table(arguments.seed, arguments.draws),
        time_table(arguments.seed, *arguments.largest),
    ]
    publish(header("Placing experts by cost and speed", arguments) + "\n".join(tables), arguments.out)


if __name__ == "__main__":
    main()
