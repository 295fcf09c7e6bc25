"""What deciding costs as a cluster grows, simulated up to 4,096 hosts and 16,384 experts; and what real actors cost here.

Nothing is run on the simulated hosts: the functions that decide for them are. Each row of the first table is one of these,
each column a size; in brackets how the time grows from the size before, as the exponent of the number of hosts (1: in
proportion). Then as many actors of ours as this machine bears, on a Ray of their own: they never import torch.

    python -m benchmarks.control_plane [--largest 4096] [--repeats 3] [--actors 16 32 64 128] [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support import header, markdown_table, write_result
from experts.placement import ExpertCost, HostFacts, Placement, place, placement_of
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import plan
from orchestrator.record.host_balance import parse_placement
from orchestrator.runtime.recovery import Failure, FailureHistory, HostStatus, decide_regroup, root_cause
from orchestrator.types import GIB, MIB, seconds_text

SMALLEST, TIMES, EACH = 16, 4, 4  # hosts, hosts of the next size to those before it, experts of a host
ASKED, BAR_S = (512, 4096), 1.0
EXPERT_WEIGHTS = 3 * 2048 * 768
DRIFT = 0.3  # of the logarithm of an expert's rows, from one placing to the next
LEFT_BYTES = 4 * GIB  # that no actor may take
ROUNDS = 5
Stage = Callable[[], object]


@dataclass(frozen=True)
class Size:
    hosts: int
    experts: int

    def __str__(self) -> str:
        return f"{self.hosts:,} hosts, {self.experts:,} experts"


def sizes(largest: int) -> list[Size]:
    found = [SMALLEST]
    while found[-1] * TIMES <= largest:
        found.append(found[-1] * TIMES)
    return [Size(hosts, hosts * EACH) for hosts in found]


# --- what is decided


def zipf(count: int, draw: random.Random) -> list[float]:
    rows = [1 / (rank + 1) ** 0.8 for rank in range(count)]
    draw.shuffle(rows)
    return rows


def within_half(count: int, draw: random.Random) -> list[float]:
    return [draw.uniform(0.5, 1.5) for _ in range(count)]


def costs(rows: Sequence[float]) -> list[ExpertCost]:
    total = sum(rows)
    return [ExpertCost(6 * EXPERT_WEIGHTS * count / total, 16 * EXPERT_WEIGHTS) for count in rows]


def kinds_of_hosts(count: int, draw: random.Random) -> dict[str, list[HostFacts]]:
    """Alike devices have one speed, as the hosts tell it; then three kinds of them, and every host with a speed of its own."""
    three = [draw.choice([1.0, 2.0, 4.0]) for _ in range(count)]
    own = [speed * draw.uniform(0.95, 1.05) for speed in three]
    return {
        name: [HostFacts(speed) for speed in speeds]
        for name, speeds in (("hosts alike", [1.0] * count), ("three kinds", three), ("all different", own))
    }


def placing(size: Size, draw: random.Random) -> dict[str, Stage]:
    loads = {
        "even within half": within_half(size.experts, draw),
        "Zipf": zipf(size.experts, draw),
        "equal": [1.0] * size.experts,
    }
    hosts = kinds_of_hosts(size.hosts, draw)
    return {
        f"placing: {loaded} loads, {named}": partial(place, costs(rows), facts)
        for loaded, rows in loads.items()
        for named, facts in hosts.items()
    }


def drifted(rows: Sequence[float], draw: random.Random) -> list[float]:
    return [count * math.exp(draw.gauss(0, DRIFT)) for count in rows]


def balancing(size: Size, draw: random.Random) -> dict[str, Stage]:
    """Loads have drifted since experts were placed: how uneven hosts are by now, and a new placement."""
    hosts, before = kinds_of_hosts(size.hosts, draw)["three kinds"], within_half(size.experts, draw)
    placed, now = place(costs(before), hosts), costs(drifted(before, draw))
    return {
        "balancing: placing anew from drifted loads": lambda: (
            placement_of(placed.host_of, now, hosts),
            place(now, hosts),
        )
    }


def recovering(size: Size, draw: random.Random) -> dict[str, Stage]:
    """A host is lost, and every other one tells that it misses it: what to do, and where the experts go."""
    told = [Failure("communication", "workers lost touch with each other") for _ in range(size.hosts - 1)]
    told.insert(size.hosts // 2, Failure("worker", "a worker was lost", size.hosts // 2))
    hosts, experts = kinds_of_hosts(size.hosts - 1, draw)["three kinds"], costs(zipf(size.experts, draw))

    def decision() -> object:
        members = tuple(range(size.hosts))
        seats = HostStatus(members, frozenset({size.hosts // 2}))
        return decide_regroup(
            root_cause(told), seats, FailureHistory(failures=1), max_failures=3, patient=False
        )

    return {
        "recovery: the decision": decision,
        "recovery: and placing on the hosts left": lambda: (decision(), place(experts, hosts)),
    }


def planning(size: Size, _: random.Random) -> dict[str, Stage]:
    gpus = tuple(Gpu(index, "a GPU", 80 * GIB, 80 * GIB, (9, 0), 132, f"GPU-{index}") for index in range(8))
    machine = Inventory(gpus, 96, 512 * GIB, 512 * GIB, "a CPU", "x86_64", True, None, {}, None, GIB)
    nodes = tuple(
        Node(f"10.{n // 250}.{n % 250}.1", 96, min(8, size.hosts - 8 * n), 96)
        for n in range(-(-size.hosts // 8))
    )
    config, facts = Config.of(parallel_strategy="expert_parallel"), model_of(size.experts)
    return {
        "plan, with its JSON": lambda: json.dumps(
            plan(config, machine, facts, cluster=Cluster(nodes, joined=True)).to_json()
        )
    }


def model_of(experts: int) -> ModelFacts:
    """One MoE layer and as much again of everything else."""
    held = experts * EXPERT_WEIGHTS
    return ModelFacts(
        parameters=held + 10**9,
        trainable=held + 10**9,
        expert_parameters=held,
        gate_parameters=2048 * experts,
        experts=experts,
        moe_layers=1,
        blocks=1,
        flops_per_sample=1e12,
        activation_bytes=64.0 * MIB,
        activation_base=0.0,
        block_bytes=60.0 * MIB,
        block_input_bytes=4.0 * MIB,
        largest_bytes=8.0 * MIB,
        samples=10**9,
        validation_samples=10**5,
        unit="tokens",
        units_per_sample=2048,
        gathered_bytes=None,
        own_optimizer=False,
        method="made up",
        expert_weights=((EXPERT_WEIGHTS,) * experts,),
    )


def telling(size: Size, draw: random.Random) -> dict[str, Stage]:
    """A placement as it is written into the events of a run, and read again."""
    from orchestrator.train.strategies.placement import PlacementDecision
    from orchestrator.train.strategies.shares import MeasuredDevice

    made = place(costs(zipf(size.experts, draw)), [HostFacts(1.0)] * size.hosts)
    hosting = PlacementDecision(
        (made,), (MeasuredDevice("a GPU", 1.0),) * size.hosts, ("a node",) * size.hosts
    )
    facts = model_of(size.experts)
    return {
        "placement event, written and read": lambda: parse_placement(
            json.loads(json.dumps({"event": "placement", **hosting.event(facts)}))
        )
    }


def settling(size: Size, draw: random.Random) -> dict[str, Stage]:
    """The gate's biases at the end of a step, on every host alike."""
    import torch

    from experts.balance import update_balance
    from experts.layer import MoELayer

    layer = MoELayer(4, [4] * size.experts, 2, bias_rate=0.001)
    counts_E = torch.tensor([round(1e6 * rows) for rows in zipf(size.experts, draw)])
    return {"balancing: gate biases of a layer": lambda: update_balance(layer, [counts_E])}


STAGES = (placing, balancing, settling, recovering, planning, telling)


# --- how long it takes


def seconds_of(stage: Stage, repeats: int) -> float:
    """The quickest of the repeats, which others at work on the machine disturbed least; what is too short for the clock is done often."""
    often = 1
    while (took := _timed(stage, often)) < 0.01:
        often *= 4
    return min([took, *(_timed(stage, often) for _ in range(repeats - 1))]) / often


def _timed(stage: Stage, often: int) -> float:
    begun = time.perf_counter()
    for _ in range(often):
        stage()
    return time.perf_counter() - begun


def measured(every: Sequence[Size], repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds by stage, a figure for each size."""
    found: dict[str, list[float]] = {}
    for size in every:
        for make in STAGES:
            for name, stage in make(size, random.Random(seed)).items():
                found.setdefault(name, []).append(seconds_of(stage, repeats))
    return found


def growth(seconds: Sequence[float], hosts: Sequence[int]) -> list[float | None]:
    """The exponent of the number of hosts by which the time grew, from each size to the next."""
    steps = zip(seconds, seconds[1:], hosts, hosts[1:], strict=False)
    return [None, *(math.log(now / before) / math.log(more / fewer) for before, now, fewer, more in steps)]


def growth_table(every: Sequence[Size], found: dict[str, list[float]]) -> str:
    rows: list[list[object]] = []
    for name, seconds in found.items():
        grown = growth(seconds, [size.hosts for size in every])
        cells = [
            seconds_text(took) + (f" ({by:.2f})" if by is not None else "")
            for took, by in zip(seconds, grown, strict=True)
        ]
        rows.append([name, *cells])
    return markdown_table(["decision", *map(str, every)], rows)


def asked_for(repeats: int, seed: int) -> str:
    """The size that a bar is set for, at its slowest."""
    size = Size(*ASKED)
    found = {name: seconds_of(stage, repeats) for name, stage in placing(size, random.Random(seed)).items()}
    name, slowest = max(found.items(), key=lambda item: item[1])
    kept = "under" if slowest < BAR_S else "OVER"
    return f"{size}: {seconds_text(slowest)} at the slowest of {len(found)} ({name}): {kept} the {BAR_S:g} s asked for.\n"


def drift_table(size: Size, seed: int, times: int = 3) -> str:
    """What placing anew is good for, and what it asks to be moved."""
    draw, rows = random.Random(seed), []
    hosts, loads = kinds_of_hosts(size.hosts, draw)["three kinds"], within_half(size.experts, draw)
    placed = place(costs(loads), hosts)
    for number in range(1, times + 1):
        loads = drifted(loads, draw)
        stale, anew = placement_of(placed.host_of, costs(loads), hosts), place(costs(loads), hosts)
        rows.append(
            [
                number,
                f"{stale.imbalance:.2f}",
                f"{anew.imbalance:.2f}",
                f"{anew.bound / anew.mean:.2f}",
                f"{moved(placed, anew):.0%}",
            ]
        )
        placed = anew
    return markdown_table(
        [
            f"drift ({size})",
            "slowest / mean before",
            "placed anew",
            "no placement is below",
            "experts on another host",
        ],
        rows,
    )


def moved(before: Placement, after: Placement) -> float:
    return sum(a != b for a, b in zip(before.host_of, after.host_of, strict=True)) / len(after.host_of)


# --- real actors


class Idle:
    """Work that is done as soon as it is asked for."""

    def advance(self, segment: int) -> int:
        return segment


@contextmanager
def idling() -> Iterator[Idle]:
    yield Idle()


def actors_table(counts: Sequence[int]) -> str:
    """Hosts of experts, started in portions until the next one would leave too little memory."""
    from orchestrator.runtime.cluster.session import session

    rows: list[list[object]] = []
    begun = time.perf_counter()
    with session(Config.of(ray_address="local", gpu_mode="cpu"), print):
        started, actors = time.perf_counter() - begun, []
        each_bytes = 100.0 * MIB  # or more, once it is measured
        for count in counts:
            free = psutil.virtual_memory().available
            if free - (count - len(actors)) * each_bytes < LEFT_BYTES:
                rows.append(
                    [
                        count,
                        *["–"] * 5,
                        f"not started: {free / GIB:.1f} GiB are free, {LEFT_BYTES / GIB:.0f} are to stay",
                    ]
                )
                break
            row, took_bytes = start_up_to(count, actors)
            each_bytes = max(took_bytes, each_bytes)
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
    return f"Ray itself was up after {started:.1f} s.\n\n" + markdown_table(columns, rows)


def start_up_to(count: int, actors: list[Any]) -> tuple[list[object], float]:
    """Start what is missing to ``count``, then call all of them. The row of the table, and what one actor takes."""
    import ray

    from experts.actor_host import ExpertHost

    before, new = own_bytes(), count - len(actors)
    begun = time.perf_counter()
    host: Any = ExpertHost
    more = [host.options(num_cpus=0).remote() for _ in range(new)]
    ray.get([actor.open.remote(idling) for actor in more])
    took = time.perf_counter() - begun
    actors += more
    each = (own_bytes() - before) / new
    rounds = [
        _timed(lambda: ray.get([actor.advance.remote(1) for actor in actors]), 1) for _ in range(ROUNDS)
    ]
    left = psutil.virtual_memory().available / GIB
    shown = [
        f"{took:.1f}",
        f"{took / new:.2f}",
        f"{each / MIB:.0f}",
        f"{1e3 * statistics.median(rounds):.0f}",
        f"{left:.1f} GiB",
    ]
    return [count, new, *shown], each


def own_bytes() -> float:
    """What this process and those it started have to themselves: others at work on the machine do not count."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    every = sizes(arguments.largest)
    parts = [
        growth_table(every, measured(every, arguments.repeats, arguments.seed)),
        asked_for(arguments.repeats, arguments.seed),
    ]
    parts.append(drift_table(every[-1], arguments.seed))
    if arguments.actors:
        parts.append(actors_table(sorted(arguments.actors)))
    text = header("The control plane as a cluster grows", arguments) + "\n".join(parts)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
