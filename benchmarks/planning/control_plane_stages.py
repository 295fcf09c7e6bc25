"""The decisions of the control plane, for clusters and models of any size: placement, balancing,
recovery, planning, events.

A stage is a decision with its inputs made up, ready to be timed. Nothing runs on the simulated
hosts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from experts.placement.placement import ExpertCost, HostFacts, place, placement_of
from harness.runs.records import made
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.pass_memory import Moment, PassMemory
from orchestrator.plan.planning import plan
from orchestrator.record.experts.placements import recorded_placement
from orchestrator.record.files.event_log import encode_event
from orchestrator.runtime.recovery import Failure, FailureHistory, HostStatus, decide_regroup, root_cause
from orchestrator.types import GIB, MIB

EXPERT_WEIGHTS = 3 * 2048 * 768
DRIFT = 0.3  # standard deviation of the logarithm of an expert's rows, from one placement to the next
GPUS_PER_NODE = 8
Stage = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """The size of a simulated cluster."""

    hosts: int
    experts: int

    def __str__(self) -> str:
        return f"{self.hosts:,} hosts, {self.experts:,} experts"


# --- made-up loads and hosts


def zipf(count: int, generator: random.Random) -> list[float]:
    rows = [1 / (rank + 1) ** 0.8 for rank in range(count)]
    generator.shuffle(rows)
    return rows


def within_half(count: int, generator: random.Random) -> list[float]:
    return [generator.uniform(0.5, 1.5) for _ in range(count)]


def drifted(rows: Sequence[float], generator: random.Random) -> list[float]:
    return [count * math.exp(generator.gauss(0, DRIFT)) for count in rows]


def costs(rows: Sequence[float]) -> list[ExpertCost]:
    total = sum(rows)
    return [ExpertCost(6 * EXPERT_WEIGHTS * count / total, 16 * EXPERT_WEIGHTS) for count in rows]


def kinds_of_hosts(count: int, generator: random.Random) -> dict[str, list[HostFacts]]:
    """Return hosts of one speed, of three speeds, and with a speed each."""
    three = [generator.choice([1.0, 2.0, 4.0]) for _ in range(count)]
    different = [speed * generator.uniform(0.95, 1.05) for speed in three]
    speeds = {"hosts alike": [1.0] * count, "three kinds": three, "all different": different}
    return {name: [HostFacts(speed) for speed in many] for name, many in speeds.items()}


def model_of(experts: int) -> ModelFacts:
    """Return the facts of a model with one MoE layer, and a billion parameters next to it."""
    expert_parameters = experts * EXPERT_WEIGHTS
    whole = Moment(gradients=1.0, expert_gradients=1.0)
    peak = whole._replace(per_sample=76.0 * MIB, exchanged=8.0 * MIB)
    return ModelFacts(
        parameters=expert_parameters + 10**9,
        trainable=expert_parameters + 10**9,
        expert_parameters=expert_parameters,
        gate_parameters=2048 * experts,
        experts=experts,
        moe_layers=1,
        blocks=1,
        flops_per_sample=1e12,
        passes=PassMemory((peak,), (peak,), (peak,), end=whole),
        samples=10**9,
        validation_samples=10**5,
        unit="tokens",
        units_per_sample=2048,
        gathered_bytes=None,
        own_optimizer=False,
        method="made up",
        expert_weights=((EXPERT_WEIGHTS,) * experts,),
    )


# --- the stages


def placing(size: Size, generator: random.Random) -> dict[str, Stage]:
    """Place experts of three kinds of loads on three kinds of hosts."""
    loads = {
        "even within half": within_half(size.experts, generator),
        "Zipf": zipf(size.experts, generator),
        "equal": [1.0] * size.experts,
    }
    hosts = kinds_of_hosts(size.hosts, generator)
    return {
        f"placing: {load_name} loads, {host_name}": partial(place, costs(rows), facts)
        for load_name, rows in loads.items()
        for host_name, facts in hosts.items()
    }


def balancing(size: Size, generator: random.Random) -> dict[str, Stage]:
    """Compute the imbalance of a placement whose loads have drifted, and a new placement."""
    hosts = kinds_of_hosts(size.hosts, generator)["three kinds"]
    loads = within_half(size.experts, generator)
    placed = place(costs(loads), hosts)
    new_costs = costs(drifted(loads, generator))

    def stage() -> object:
        return placement_of(placed.host_of, new_costs, hosts), place(new_costs, hosts)

    return {"balancing: placing anew from drifted loads": stage}


def updating_biases(size: Size, generator: random.Random) -> dict[str, Stage]:
    """Update the gate's biases at the end of a step, as every host does."""
    import torch

    from experts.balance import update_balance
    from experts.moe.layer import MoELayer

    layer = MoELayer(4, [4] * size.experts, 2, bias_rate=0.001)
    counts_E = torch.tensor([round(1e6 * rows) for rows in zipf(size.experts, generator)])
    return {"balancing: gate biases of a layer": lambda: update_balance(layer, [counts_E])}


def recovering(size: Size, generator: random.Random) -> dict[str, Stage]:
    """Decide what to do when a host is lost and every other one reports a broken connection."""
    lost = size.hosts // 2
    failures = [Failure("communication", "workers lost touch with each other") for _ in range(size.hosts - 1)]
    failures.insert(lost, Failure("worker", "a worker was lost", lost))
    hosts = kinds_of_hosts(size.hosts - 1, generator)["three kinds"]
    experts = costs(zipf(size.experts, generator))

    def decision() -> object:
        status = HostStatus(tuple(range(size.hosts)), frozenset({lost}))
        history = FailureHistory((0,))
        return decide_regroup(root_cause(failures), status, history, max_failures=3, may_wait=False)

    return {
        "recovery: the decision": decision,
        "recovery: and placing on the hosts left": lambda: (decision(), place(experts, hosts)),
    }


def planning(size: Size, _: random.Random) -> dict[str, Stage]:
    """Plan a run on the whole cluster, and write the plan as JSON."""
    gpus = tuple(
        Gpu(index, "a GPU", 80 * GIB, 80 * GIB, (9, 0), 132, f"GPU-{index}") for index in range(GPUS_PER_NODE)
    )
    machine = Inventory(gpus, 96, 512 * GIB, 512 * GIB, "a CPU", "x86_64", True, None, {}, None, GIB)
    num_nodes = -(-size.hosts // GPUS_PER_NODE)
    nodes = tuple(
        Node(f"10.{n // 250}.{n % 250}.1", 96, min(GPUS_PER_NODE, size.hosts - GPUS_PER_NODE * n), 96)
        for n in range(num_nodes)
    )
    config = Config.of(parallel_strategy="expert_parallel")
    facts = model_of(size.experts)

    def stage() -> object:
        return json.dumps(plan(config, machine, facts, cluster=Cluster(nodes, joined=True)).to_json())

    return {"plan, with its JSON": stage}


def recording(size: Size, generator: random.Random) -> dict[str, Stage]:
    """Write a placement as an event of a run, and read it again."""
    from orchestrator.train.strategies.placement import PlacementDecision
    from orchestrator.train.strategies.shares import MeasuredDevice

    placed = place(costs(zipf(size.experts, generator)), [HostFacts(1.0)] * size.hosts)
    devices = (MeasuredDevice("a GPU", 1.0),) * size.hosts
    decision = PlacementDecision((placed,), devices, (HostFacts(1.0, node="a node"),) * size.hosts, 1)
    facts = model_of(size.experts)

    def stage() -> object:
        text = encode_event(decision.event(facts))
        return recorded_placement(made(json.loads(text)))

    return {"placement event, written and read": stage}


STAGES = (placing, balancing, updating_biases, recovering, planning, recording)
