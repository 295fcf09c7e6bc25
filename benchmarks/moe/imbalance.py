"""Max/mean of the hosts' load with and without moving and copying experts, by distribution of the loads.

The loads of each step are drawn at random; the decisions are those of a run (``experts.rebalance``). The
times are predicted: the slowest host's experts, the sum of the copies' gradients, and what is sent.
Nothing runs on the hosts, unless ``--real`` asks for steps on processes of this machine.

    python -m benchmarks.moe.imbalance [--hosts 2 4 8 32] [--experts 8 32 128] [--steps 120] [--out FILE]
    python -m benchmarks.moe.imbalance --real --hosts 2 --experts 8 --steps 80 [--tokens 4096]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.placement.division import copy_seconds, host_seconds
from experts.placement.placement import HostFacts, place
from experts.rebalance.costs import Cluster, LayerCosts, balance_problem, shares_of
from experts.rebalance.decisions import BalanceRules, decide, layer_imbalance
from experts.rebalance.load_history import LoadHistory
from experts.rebalance.plan import Transfer
from experts.structure import LayerStructure, changed

WIDTH = 2048
HIDDEN = 2048
ROWS = 65_536  # per host and step: 8,192 tokens with 8 experts each
SPEED = 400e12  # FLOPs per second of a host: an H200 in bf16
INTERVAL = 5  # steps between two decisions
BALANCED = 1.05
COSTS = LayerCosts(row_flops=18 * WIDTH, state_bytes=3 * WIDTH * 16, gradient_bytes=3 * WIDTH * 2)
"""Three matrices: two FLOPs each and element, backward twice as many; AdamW in fp32, gradients in bf16."""
SIZES = {"one": (1,), "1:2:4": (1, 2, 4)}
SPEEDS = {"equal": (1,), "1:2": (1, 2)}
KINDS = (("one", "equal"), ("1:2:4", "1:2"))
"""Sizes of the experts and speeds of the hosts."""

Random = np.random.Generator
Shares = Iterator[np.ndarray]
"""The shares of the tokens that the experts get, step by step."""


# --- distributions of the loads


def zipf(count: int, exponent: float, random: Random) -> np.ndarray:
    weights = 1 / np.arange(1, count + 1) ** exponent
    return random.permutation(weights / weights.sum())


def one_hot(count: int, share: float, random: Random) -> np.ndarray:
    shares = np.full(count, (1 - share) / (count - 1))
    shares[random.integers(count)] = share
    return shares


def steady(shares: np.ndarray) -> Shares:
    return itertools.repeat(shares)


def drifting(count: int, random: Random, steps: int = 100) -> Shares:
    """Go from one order of Zipf's law to another within some steps, then to the next."""
    following = zipf(count, 1.0, random)
    while True:
        present, following = following, zipf(count, 1.0, random)
        for step in range(steps):
            yield present + (following - present) * step / steps


def alternating(count: int, random: Random, steps: int = 10) -> Shares:
    orders = [zipf(count, 1.5, random) for _ in range(2)]
    return itertools.cycle([orders[0]] * steps + [orders[1]] * steps)


def bursty(count: int, random: Random, steps: int = 3, chance: float = 0.05) -> Shares:
    """Uniform, except that now and then an expert gets half of the tokens for a few steps."""
    uniform = np.full(count, 1 / count)
    while True:
        if random.random() < chance:
            yield from itertools.repeat(one_hot(count, 0.5, random), steps)
        yield uniform


DISTRIBUTIONS: dict[str, Callable[[int, Random], Shares]] = {
    "uniform": lambda count, _: steady(np.full(count, 1 / count)),
    "Zipf 1.0": lambda count, random: steady(zipf(count, 1.0, random)),
    "Zipf 1.5": lambda count, random: steady(zipf(count, 1.5, random)),
    "one hot, 50%": lambda count, random: steady(one_hot(count, 0.5, random)),
    "one hot, 90%": lambda count, random: steady(one_hot(count, 0.9, random)),
    "drifting": drifting,
    "alternating": alternating,
    "bursty": bursty,
}


# --- one case


@dataclass(frozen=True)
class Case:
    distribution: str
    num_hosts: int
    num_experts: int
    sizes: str = "one"
    speeds: str = "equal"
    bandwidth: float = 400e9

    @property
    def cluster(self) -> Cluster:
        factors = itertools.islice(itertools.cycle(SPEEDS[self.speeds]), self.num_hosts)
        return Cluster(tuple(HostFacts(SPEED * factor) for factor in factors), self.bandwidth)

    def layer(self) -> LayerStructure:
        """Return the layer as a run begins with it: placed for equal loads."""
        factors = itertools.islice(itertools.cycle(SIZES[self.sizes]), self.num_experts)
        sizes = [HIDDEN * factor for factor in factors]
        placed = place([COSTS.expert(size, 1.0) for size in sizes], self.cluster.hosts)
        return LayerStructure.initial("moe", sizes, placed.host_of)

    def loads(self, steps: int, seed: int) -> list[list[int]]:
        """Return the tokens of each expert in each step."""
        random = np.random.default_rng(seed)
        shares = DISTRIBUTIONS[self.distribution](self.num_experts, random)
        drawn = itertools.islice(shares, steps)
        return [random.multinomial(ROWS * self.num_hosts, each).tolist() for each in drawn]


@dataclass
class Result:
    """Figures of each step, and of all decisions."""

    imbalances: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    even_seconds: list[float] = field(default_factory=list)
    """Were the load even, and nothing copied."""
    moves: int = 0
    copies: int = 0
    """Added or removed."""
    points: int = 0
    """At which anything was changed."""
    bytes: float = 0.0
    transfer_seconds: float = 0.0
    decision_seconds: list[float] = field(default_factory=list)

    def steps_until_balanced(self) -> int | None:
        """Return the first step from which ten steps are balanced in the mean."""
        for step in range(len(self.imbalances) - 10):
            if statistics.mean(self.imbalances[step : step + 10]) <= BALANCED:
                return step
        return None

    def late_imbalance(self) -> float:
        return statistics.mean(self.imbalances[len(self.imbalances) // 2 :])

    def throughput(self) -> float:
        """Return the share of the throughput with an even load, in the second half of the steps."""
        half = len(self.seconds) // 2
        return sum(self.even_seconds[half:]) / sum(self.seconds[half:])


def simulate(case: Case, loads: Sequence[Sequence[int]], rules: BalanceRules | None) -> Result:
    """Run the steps; decide every ``INTERVAL`` steps if there are rules."""
    layer = case.layer()
    cluster = case.cluster
    history = LoadHistory()
    result = Result()
    for step, counts in enumerate(loads, start=1):
        problem = balance_problem(layer, tuple(counts), COSTS, cluster)
        shares = shares_of(layer, case.num_hosts)
        result.imbalances.append(layer_imbalance(layer, counts, COSTS, cluster))
        result.seconds.append(max(host_seconds(problem, shares)) + copy_seconds(problem, shares))
        result.even_seconds.append(problem.mean)
        if rules is not None and step % INTERVAL == 0:
            window = np.sum(loads[step - INTERVAL : step], axis=0).tolist()
            history = history.observed(layer.ids, window, INTERVAL)
            layer = _decided(layer, history, case, rules, result)
    return result


def _decided(
    layer: LayerStructure, history: LoadHistory, case: Case, rules: BalanceRules, result: Result
) -> LayerStructure:
    """Return the layer after the changes of one decision."""
    begun = time.perf_counter()
    changes = decide([layer], [history], [COSTS], case.cluster, rules)
    result.decision_seconds.append(time.perf_counter() - begun)
    before = layer
    for change in changes:
        layer = changed(layer, change, 0)
    _count_changes(before, layer, case, result)
    return layer


def _count_changes(before: LayerStructure, after: LayerStructure, case: Case, result: Result) -> None:
    sizes = [expert.size * COSTS.state_bytes for expert in before.experts]
    transfer = Transfer.between(before, after, sizes, case.num_hosts, case.bandwidth)
    result.bytes += transfer.bytes
    result.transfer_seconds += transfer.seconds
    result.points += before != after
    for old, new in zip(before.experts, after.experts, strict=True):
        if len(old.hosts) == len(new.hosts) == 1:
            result.moves += old.hosts != new.hosts
        else:
            result.copies += len(set(old.hosts) ^ set(new.hosts))


# --- tables

NOTE = """Max/mean is the time of the slowest host's experts over the mean of all hosts, in the second half of
the steps. Throughput is relative to an even load without copies, of the experts alone, in these steps; it
includes the sum of the copies' gradients, and not what is sent for moves and copies. "Until" is the first
of ten steps that are balanced in the mean.

"""
COLUMNS = [
    "loads",
    "hosts",
    "experts",
    "sizes",
    "speeds",
    "max/mean without",
    "max/mean with",
    "steps until ≤ 1.05",
    "points with changes",
    "moves",
    "copies added or removed",
    "GB sent",
    "ms sending",
    "throughput without",
    "throughput with",
    "decision, ms",
]


def row(case: Case, steps: int, seed: int, rules: BalanceRules) -> list[object]:
    loads = case.loads(steps, seed)
    without = simulate(case, loads, None)
    balanced = simulate(case, loads, rules)
    until = balanced.steps_until_balanced()
    return [
        case.distribution,
        case.num_hosts,
        case.num_experts,
        case.sizes,
        case.speeds,
        f"{without.late_imbalance():.2f}",
        f"{balanced.late_imbalance():.3f}",
        "never" if until is None else until,
        balanced.points,
        balanced.moves,
        balanced.copies,
        f"{balanced.bytes / 1e9:.1f}",
        f"{1000 * balanced.transfer_seconds:.1f}",
        f"{without.throughput():.1%}",
        f"{balanced.throughput():.1%}",
        f"{1000 * max(balanced.decision_seconds):.0f}",
    ]


SUMMARY_COLUMNS = [
    "loads",
    "cases",
    "max/mean without: median",
    "worst",
    "with: median",
    "worst",
    "most steps until ≤ 1.05",
    "throughput without: least",
    "with: least",
]


def summary(rows: Sequence[Sequence[object]]) -> list[list[object]]:
    """Return a row for each distribution, of all its cases."""
    found: list[list[object]] = []
    for name in DISTRIBUTIONS:
        cases = [dict(zip(COLUMNS, map(str, row), strict=True)) for row in rows if row[0] == name]
        without = [float(case["max/mean without"]) for case in cases]
        balanced = [float(case["max/mean with"]) for case in cases]
        until = [case["steps until ≤ 1.05"] for case in cases]
        throughput = [
            min(float(case[f"throughput {which}"].rstrip("%")) for case in cases)
            for which in ("without", "with")
        ]
        found.append(
            [
                name,
                len(cases),
                f"{statistics.median(without):.2f}",
                f"{max(without):.2f}",
                f"{statistics.median(balanced):.3f}",
                f"{max(balanced):.3f}",
                "never" if "never" in until else max(map(int, until)),
                *(f"{share:.1f}%" for share in throughput),
            ]
        )
    return found


def simulated_tables(arguments: argparse.Namespace) -> str:
    cases = [
        Case(name, hosts, experts, sizes, speeds, arguments.bandwidth)
        for name in DISTRIBUTIONS
        for hosts in arguments.hosts
        for experts in arguments.experts
        for sizes, speeds in KINDS
    ]
    rows = [row(case, arguments.steps, arguments.seed, BalanceRules()) for case in cases]
    return NOTE + markdown_table(SUMMARY_COLUMNS, summary(rows)) + "\n" + markdown_table(COLUMNS, rows)


def real_tables(arguments: argparse.Namespace) -> str:
    from benchmarks.moe import imbalance_real as real

    (hosts,) = arguments.hosts
    (experts,) = arguments.experts
    tokens: int = arguments.tokens
    cases: list[list[np.ndarray]] = []
    for distribution in DISTRIBUTIONS.values():
        random = np.random.default_rng(arguments.seed)
        cases.append(list(itertools.islice(distribution(experts, random), arguments.steps)))
    found = real.run_on_hosts(real.alternating_variants, hosts, tokens, cases)
    rows = [real.row(name, case) for name, case in zip(DISTRIBUTIONS, found, strict=True)]
    (groups,) = real.run_on_hosts(real.replica_variants, 4, tokens, [cases[1][:3]])
    note = real.NOTE.format(
        tokens=tokens, experts=experts, hidden=real.HIDDEN, width=real.WIDTH, block=real.BLOCK
    )
    columns = ["MB per step, 1 replica", "MB per step, 2 replicas", "ratio"]
    groups_note = (
        "\nBytes that four hosts send for the experts (Zipf 1.0), with `--expert-replicas` 1 and 2:\n\n"
    )
    return (
        note
        + markdown_table(real.COLUMNS, rows)
        + groups_note
        + markdown_table(columns, [real.bytes_row(groups)])
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="run steps on processes of this machine")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1024, help="per host and real step")
    parser.add_argument("--bandwidth", type=float, default=400e9, help="bytes per second of a host's link")
    arguments = parser.parse_args()
    if arguments.real and (len(arguments.hosts) > 1 or len(arguments.experts) > 1):
        parser.error("--real needs one number of --hosts and one of --experts, for example 2 and 8")
    title = "Balancing uneven loads, real steps" if arguments.real else "Balancing uneven loads, simulated"
    tables = real_tables(arguments) if arguments.real else simulated_tables(arguments)
    publish(header(title, arguments) + tables, arguments.out)


if __name__ == "__main__":
    main()
