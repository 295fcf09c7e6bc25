"""Where experts live: what they cost and what the hosts can do, measured, becomes a placement that all hosts agree on."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from experts.placement import (
    CannotPlace,
    ExpertCost,
    HostFacts,
    Placement,
    place,
    placement_of,
    read_placement,
    round_robin,
)
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.planning import Plan
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.placement_file import placement_file
from orchestrator.train.strategies.shares import MeasuredDevice, measure_devices

_STATE_BYTES = 16  # per parameter: weight, gradient and two moments in fp32
_PASSES = 3  # products of a training step, in multiples of the forward pass
_FLOPS = 2  # per parameter and row, forward


@dataclass(frozen=True)
class PlacementDecision:
    """The placement of each MoE layer, and the hosts it was made for."""

    layers: tuple[Placement, ...]
    devices: tuple[MeasuredDevice, ...]
    nodes: tuple[str, ...]

    @property
    def host_of(self) -> list[tuple[int, ...]]:
        return [layer.host_of for layer in self.layers]

    def measured(self, asked: str) -> dict[str, Any]:
        """What a later start of the run is to know."""
        return {
            "device_speeds": {device.name: device.speed for device in self.devices},
            "placement": [list(layer) for layer in self.host_of],
            "placement_asked": asked,
            "placement_hosts": len(self.devices),
        }

    def event(self, facts: ModelFacts) -> dict[str, Any]:
        """The fields of a ``placement`` event."""
        hosts = [
            {"rank": rank, "node": node, "name": device.name, "speed": device.speed}
            for rank, (device, node) in enumerate(zip(self.devices, self.nodes, strict=True))
        ]
        wholes = [max(1, sum(weights)) for weights in facts.expert_weights]
        layers = [
            {
                "host_of": list(layer.host_of),
                "sizes": list(weights),
                "costs": [weight / whole for weight in weights],
                "seconds": list(layer.seconds),
                "bound": layer.bound,
                "imbalance": layer.imbalance,
                "gap": layer.gap,
            }
            for layer, weights, whole in zip(self.layers, facts.expert_weights, wholes, strict=True)
        ]
        worst = max(self.layers, key=lambda layer: layer.imbalance)
        every = f", the least even of {len(self.layers)} layers" if len(self.layers) > 1 else ""
        return {
            "method": worst.method,
            "hosts": hosts,
            "layers": layers,
            "sentence": worst.sentence() + every,
        }


def decide_placement(
    config: Config,
    plan: Plan,
    facts: ModelFacts,
    world: World,
    known: Mapping[str, Any],
    loads: Sequence[Sequence[float]],
) -> PlacementDecision:
    """The placement that this run uses: the one it began with where it fits these hosts, else a new one. The main host decides
    for all. ``loads`` are tokens per expert and layer as last seen, empty for a new run. All hosts must ask."""
    exact = config.run.deterministic  # speeds differ from measurement to measurement
    devices = (
        [MeasuredDevice(plan.device.value, 1.0)] * world.size
        if exact
        else measure_devices(plan, world, known)
    )
    nodes = [
        world.broadcast_value(f"node/{rank}", platform.node() if rank == world.rank else None)
        for rank in range(world.size)
    ]
    memory = [row[0] for row in world.gather([_room(config, plan, facts, world)])]
    hosts = [
        HostFacts(device.speed, room, node) for device, room, node in zip(devices, memory, nodes, strict=True)
    ]
    made = (
        [asdict(layer) for layer in _layers(config, plan, facts, hosts, known, loads)]
        if world.is_main
        else None
    )
    layers = [
        Placement(**{**layer, **{name: tuple(layer[name]) for name in ("host_of", "seconds")}})
        for layer in world.broadcast_value("placement", made)
    ]
    return PlacementDecision(tuple(layers), tuple(devices), tuple(nodes))


@dataclass(frozen=True)
class PredictedPlacement:
    """The placement of each layer, as far as it can be told before a run, and what that assumes."""

    layers: tuple[Placement, ...]
    assumes: str

    def to_json(self) -> dict[str, Any]:
        return {"assumes": self.assumes, "host_of": [list(layer.host_of) for layer in self.layers]}


def predict_placement(config: Config, plan: Plan, facts: ModelFacts) -> PredictedPlacement | None:
    """Where a new run would put its experts, with nothing measured; None where they have no hosts of their own."""
    if plan.strategy.value != "expert_parallel":
        return None
    hosts = [HostFacts(1.0, _left_for_experts(plan.memory.limit, plan, facts))] * plan.workers.value
    layers = _layers(config, plan, facts, hosts, {}, ())
    if plan.placement.value == "round_robin":
        assumes = "in turn"
    elif plan.placement.value != "auto":
        assumes = f"as {plan.placement.value} says"
    elif config.run.deterministic:
        assumes = "by the experts' sizes; hosts count as equal with --deterministic"
    else:
        assumes = "by the experts' sizes, on hosts taken to be equally fast; a run measures their speeds first and may place otherwise"
    return PredictedPlacement(tuple(layers), assumes)


def _layers(
    config: Config,
    plan: Plan,
    facts: ModelFacts,
    hosts: Sequence[HostFacts],
    known: Mapping[str, Any],
    loads: Sequence[Sequence[float]],
) -> list[Placement]:
    """A file's placement, the one that the run began with on as many hosts, or a new one."""
    costs = _costs(facts, loads)
    try:
        if (chosen := placement_file(config, facts, len(hosts))) is not None:
            return _in_turn(costs, hosts, lambda number, *rest: placement_of(chosen[number], *rest))
        before = known.get("placement")
        alike = (known.get("placement_asked"), known.get("placement_hosts")) == (
            config.parallel.placement,
            len(hosts),
        )
        if before is not None and alike and _fits(before, facts, len(hosts)):
            with suppress(CannotPlace):  # there was more memory then
                return _in_turn(
                    costs,
                    hosts,
                    lambda number, *rest: replace(placement_of(before[number], *rest), method="as before"),
                )
        make = round_robin if plan.placement.value == "round_robin" else place
        return _in_turn(costs, hosts, lambda _, *rest: make(*rest))
    except CannotPlace as error:
        raise ResourceError(str(error)) from None


def _in_turn(
    costs: list[list[ExpertCost]], hosts: Sequence[HostFacts], make: Callable[..., Placement]
) -> list[Placement]:
    """Layer by layer: what one takes of a host's memory is missing for the next."""
    used, made = [0.0] * len(hosts), []
    for number, layer in enumerate(costs):
        made.append(make(number, layer, hosts, used))
        used = list(used)
        for expert, host in zip(layer, made[-1].host_of, strict=True):
            used[host] += expert.bytes
    return made


def _fits(host_of: Any, facts: ModelFacts, hosts: int) -> bool:
    """Whether an earlier placement is one for these layers and hosts."""
    try:
        read_placement(
            json.dumps({"layers": host_of}),
            len(facts.expert_weights),
            [len(w) for w in facts.expert_weights],
            hosts,
        )
    except ValueError:
        return False
    return max((host for layer in host_of for host in layer), default=0) < hosts


def _costs(facts: ModelFacts, loads: Sequence[Sequence[float]]) -> list[list[ExpertCost]]:
    """What each expert of each layer costs a step: FLOPs for the share of rows it had, or an even one, and bytes of state."""
    costs: list[list[ExpertCost]] = []
    for number, weights in enumerate(facts.expert_weights):
        seen = loads[number] if number < len(loads) and len(loads[number]) == len(weights) else []
        total = sum(seen)
        shares = [tokens / total for tokens in seen] if total > 0 else [1 / len(weights)] * len(weights)
        costs.append(
            [
                ExpertCost(_PASSES * _FLOPS * w * share, _STATE_BYTES * w)
                for w, share in zip(weights, shares, strict=True)
            ]
        )
    return costs


def _room(config: Config, plan: Plan, facts: ModelFacts, world: World) -> float:
    """Bytes that this host has for experts: what it may use, less the dense part and the activations."""
    limit = plan.memory.limit
    if limit is not None and world.device.type == "cuda":  # the plan's is that of the smallest device
        limit = torch.cuda.get_device_properties(world.device).total_memory * config.batch.gpu_memory_fraction
    return _left_for_experts(limit, plan, facts)


def _left_for_experts(limit: float | None, plan: Plan, facts: ModelFacts) -> float:
    if limit is None:
        return math.inf
    held = facts.expert_parameters * -(-facts.experts // plan.workers.value) / max(1, facts.experts)
    return max(0.0, limit - (plan.memory.total - _STATE_BYTES * held))
