"""Placement of experts on hosts: measured speeds, memory and costs become a decision that all hosts share."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from experts.placement.placement import (
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
from orchestrator.plan.compute import with_memory_settings
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.host_groups import expert_memory, hosts_of_group
from orchestrator.plan.planning import Plan
from orchestrator.record.events import kinds
from orchestrator.train.group.world import World
from orchestrator.train.strategies.placement_file import placement_file
from orchestrator.train.strategies.shares import MeasuredDevice, own_device, with_mean_speeds

_PASSES = 3  # products of a training step, in multiples of the forward pass
_FLOPS = 2  # per parameter and row, forward


@dataclass(frozen=True)
class PlacementDecision:
    """The placement of each MoE layer, and the hosts it was made for."""

    layers: tuple[Placement, ...]
    devices: tuple[MeasuredDevice, ...]
    hosts: tuple[HostFacts, ...]
    groups: int
    """Groups of hosts that each hold every expert; the layers are placed on the first."""

    @property
    def host_of(self) -> list[tuple[int, ...]]:
        """The host of each expert, by layer."""
        return [layer.host_of for layer in self.layers]

    def saved_fields(self, requested: str) -> dict[str, Any]:
        """Return the fields of ``plan.json`` that a resumed run takes its placement from."""
        return {
            "device_speeds": {device.name: device.speed for device in self.devices},
            "placement": [list(layer) for layer in self.host_of],
            "placement_asked": requested,
            "placement_hosts": len(self.layers[0].seconds) if self.layers else len(self.devices),
        }

    def event(self, facts: ModelFacts, step: int = 0) -> kinds.Placement:
        """Return the event of a placement at a step."""
        hosts = tuple(
            kinds.PlacedHost(rank=rank, node=host.node, name=device.name, speed=device.speed)
            for rank, (device, host) in enumerate(zip(self.devices, self.hosts, strict=True))
        )
        layers = tuple(
            _placed_layer(layer, weights)
            for layer, weights in zip(self.layers, facts.expert_weights, strict=True)
        )
        worst = max(self.layers, key=lambda layer: layer.imbalance)
        scope = f", the least even of {len(self.layers)} layers" if len(self.layers) > 1 else ""
        return kinds.Placement(
            step=step, method=worst.method, hosts=hosts, layers=layers, sentence=worst.sentence() + scope
        )


def _placed_layer(layer: Placement, weights: Sequence[int]) -> kinds.PlacedLayer:
    total = max(1, sum(weights))
    return kinds.PlacedLayer(
        host_of=tuple((host,) for host in layer.host_of),
        sizes=tuple(weights),
        costs=tuple(weight / total for weight in weights),
        seconds=tuple(layer.seconds),
        bound=layer.bound,
        imbalance=layer.imbalance,
        gap=layer.gap,
    )


def decide_placement(
    config: Config,
    plan: Plan,
    facts: ModelFacts,
    world: World,
    known: Mapping[str, Any],
    loads: Sequence[Sequence[float]],
    name: str = "placement",
    groups: int = 1,
) -> PlacementDecision:
    """Decide where the experts of a run live. All hosts must call; the main host decides for all.

    A resumed run keeps its placement (from ``known``, the fields of its plan) if it fits these hosts.
    ``loads`` are tokens per expert and layer as last seen, empty for a new run. With several ``groups`` of
    hosts that each hold all experts, it is the placement on the first group. ``name`` is used once per
    generation of the group.
    """
    facts = with_memory_settings(config, facts)
    # Measured speeds differ from one measurement to the next: a deterministic run uses none.
    is_measured = not config.run.repeats
    own = own_device(plan, world, known) if is_measured else MeasuredDevice(plan.device.value, 1.0)
    # One gather of all that is known about a host: the rounds do not grow with the hosts.
    facts_of_host = [own.name, own.speed, platform.node(), _expert_memory(config, plan, facts, world)]
    names, speeds, nodes, memory = zip(*world.gather_values(facts_of_host), strict=True)
    devices = with_mean_speeds([MeasuredDevice(*pair) for pair in zip(names, speeds, strict=True)])
    hosts = [
        HostFacts(device.speed, num_bytes, node)
        for device, num_bytes, node in zip(devices, memory, nodes, strict=True)
    ]
    decided = None
    if world.is_main:
        group = hosts[: world.size // groups]
        decided = [asdict(layer) for layer in _place_layers(config, plan, facts, group, known, loads)]
    layers = [_placement_from_json(fields) for fields in world.broadcast_value(name, decided)]
    return PlacementDecision(tuple(layers), tuple(devices), tuple(hosts), groups)


def _placement_from_json(fields: dict[str, Any]) -> Placement:
    tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("host_of", "seconds")}
    return Placement(**fields | tuples)


@dataclass(frozen=True)
class PredictedPlacement:
    """The placement of each layer as predicted before a run, and the assumptions behind it."""

    layers: tuple[Placement, ...]
    assumes: str

    def to_json(self) -> dict[str, Any]:
        return {"assumes": self.assumes, "host_of": [list(layer.host_of) for layer in self.layers]}


def predict_placement(config: Config, plan: Plan, facts: ModelFacts) -> PredictedPlacement | None:
    """Predict the placement of a new run without measuring; None unless the plan is expert parallel.

    With several groups of hosts it is that of the first, as in a run."""
    if not plan.strategy_facts.divides_experts:
        return None
    facts = with_memory_settings(config, facts)
    hosts = [HostFacts(1.0, expert_memory(plan.memory.limit, plan, facts))] * hosts_of_group(plan)
    layers = _place_layers(config, plan, facts, hosts, {}, ())
    if plan.placement.value == "round_robin":
        assumes = "in turn"
    elif plan.placement.value != "auto":
        assumes = f"as {plan.placement.value} says"
    elif config.run.repeats:
        assumes = "by the experts' sizes; hosts count as equal with --deterministic"
    else:
        assumes = (
            "by the experts' sizes, on hosts taken to be equally fast; "
            "a run measures their speeds first and may place otherwise"
        )
    replicas = plan.expert_replicas.value
    if replicas > 1:
        assumes += f"; these are the hosts of the first of {replicas} groups, and the others are placed alike"
    return PredictedPlacement(tuple(layers), assumes)


def _place_layers(
    config: Config,
    plan: Plan,
    facts: ModelFacts,
    hosts: Sequence[HostFacts],
    known: Mapping[str, Any],
    loads: Sequence[Sequence[float]],
) -> list[Placement]:
    """Return the placement of a file, the last one on as many hosts, or a new one.

    A file is outdated once experts may have been born or moved. It counts for the hosts that the run was
    started on: where some of them are lost, those that are left share all experts."""
    costs = _expert_costs(facts, loads)
    try:
        applies = len(hosts) == hosts_of_group(plan) and not known.get("placement_outdated", False)
        from_file = placement_file(config, facts, len(hosts)) if applies else None
        if from_file is not None:
            return place_in_turn(costs, hosts, lambda number, *rest: placement_of(from_file[number], *rest))
        before = known.get("placement")
        made_for = (known.get("placement_asked"), known.get("placement_hosts"))
        same_request = made_for == (config.parallel.placement, len(hosts))
        if before is not None and same_request and _is_valid(before, facts, len(hosts)):
            with suppress(CannotPlace):  # the hosts have less memory now
                return place_in_turn(
                    costs,
                    hosts,
                    lambda number, *rest: replace(placement_of(before[number], *rest), method="as before"),
                )
        place_layer = round_robin if plan.placement.value == "round_robin" else place
        return place_in_turn(costs, hosts, lambda _, *rest: place_layer(*rest))
    except CannotPlace as error:
        raise ResourceError(str(error)) from None


def place_in_turn(
    costs: list[list[ExpertCost]], hosts: Sequence[HostFacts], place_layer: Callable[..., Placement]
) -> list[Placement]:
    """Place one layer after another; each leaves less of a host's memory for the next."""
    used_bytes = [0.0] * len(hosts)
    placements: list[Placement] = []
    for number, experts in enumerate(costs):
        placement = place_layer(number, experts, hosts, used_bytes)
        placements.append(placement)
        used_bytes = list(used_bytes)
        for expert, host in zip(experts, placement.host_of, strict=True):
            used_bytes[host] += expert.bytes
    return placements


def _is_valid(host_of: Any, facts: ModelFacts, num_hosts: int) -> bool:
    """Return whether a saved placement has these layers, experts and hosts."""
    num_experts = [len(weights) for weights in facts.expert_weights]
    try:
        read_placement(json.dumps({"layers": host_of}), len(num_experts), num_experts, num_hosts)
    except ValueError:
        return False
    return max((host for layer in host_of for host in layer), default=0) < num_hosts


def _expert_costs(facts: ModelFacts, loads: Sequence[Sequence[float]]) -> list[list[ExpertCost]]:
    """Return the cost of each expert of each layer: FLOPs per step for its share of rows, and bytes of
    state.

    The share is the one last seen, or an even one.
    """
    costs: list[list[ExpertCost]] = []
    for number, weights in enumerate(facts.expert_weights):
        is_known = number < len(loads) and len(loads[number]) == len(weights)
        tokens = loads[number] if is_known else []
        total = sum(tokens)
        shares = [count / total for count in tokens] if total > 0 else [1 / len(weights)] * len(weights)
        costs.append(
            [
                ExpertCost(_PASSES * _FLOPS * weight * share, facts.expert_state_bytes * weight)
                for weight, share in zip(weights, shares, strict=True)
            ]
        )
    return costs


def _expert_memory(config: Config, plan: Plan, facts: ModelFacts, world: World) -> float:
    """Return the bytes that this host has for experts."""
    limit = plan.memory.limit
    if limit is not None and world.device.type == "cuda":
        # The plan's limit is that of the smallest device.
        limit = torch.cuda.get_device_properties(world.device).total_memory * config.batch.gpu_memory_fraction
    return expert_memory(limit, plan, facts)
