"""The experts that a worker builds its model with: as saved, and placed on the hosts of this start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from experts.balance import moe_layers
from experts.rebalance.replicas import group_count
from experts.structure import LayerStructure
from experts.surgery.surgery import restructure
from orchestrator.checkpoint.saved_experts import SavedExperts
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.host_groups import groups_on
from orchestrator.plan.planning import Plan
from orchestrator.record.events import kinds
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.train.group.world import World
from orchestrator.train.strategies.placement import PlacementDecision, decide_placement


@dataclass(frozen=True)
class PlacedExperts:
    """The experts of a model, and where they live."""

    layers: Sequence[LayerStructure] | None = None
    """The experts, where they are not as the task builds them or have copies."""
    host_of: Sequence[Sequence[int]] | None = None
    """The host of each expert, by layer; None unless the run is expert parallel."""
    groups: int = 1
    """The groups of hosts that each hold every expert; ``host_of`` are the hosts of the first."""
    decision: PlacementDecision | None = None
    """The decision behind ``host_of``."""

    @classmethod
    def by(cls, decision: PlacementDecision, layers: Sequence[LayerStructure] | None = None) -> PlacedExperts:
        return cls(layers, decision.host_of, decision.groups, decision)


ON_ONE_HOST = PlacedExperts()
"""Experts as the task builds them, in one process or whole on every worker."""


def place_experts(
    prepared: PreparedRun,
    world: World,
    known: Mapping[str, Any],
    saved: SavedExperts | None,
    loads: Sequence[Mapping[str, float]],
    name: str = "placement",
) -> PlacedExperts:
    """Decide where the experts live. All workers must call it; ``name`` is used once per generation.

    Saved experts keep their hosts and copies where there are as many hosts as before."""
    saved_layers = saved.layers if saved is not None and saved.have_changed else None
    if not prepared.plan.strategy_facts.divides_experts or world.size == 1:
        return PlacedExperts(_on_one_host(saved_layers)) if saved_layers else ON_ONE_HOST
    facts = facts_with_experts(prepared.facts, saved)
    config = prepared.resolved.config
    groups = groups_on(config, prepared.plan, prepared.facts, world.size).value
    # With another number of groups, the saved hosts mean nothing.
    has_same_groups = saved is not None and group_count(saved.layers, saved.hosts) == groups
    before = _known(known, saved if has_same_groups else None, prepared.plan, groups)
    counts = _in_order(loads, facts, saved_layers)
    decision = decide_placement(config, prepared.plan, facts, world, before, counts, name, groups)
    if saved is not None and has_same_groups and groups == 1 and _keeps_hosts(saved, decision, world):
        has_copies = any(len(expert.hosts) > 1 for layer in saved.layers for expert in layer.experts)
        return PlacedExperts.by(decision, saved.layers if saved_layers or has_copies else None)
    return PlacedExperts.by(decision, _on_hosts(saved_layers, decision.host_of) if saved_layers else None)


def _keeps_hosts(saved: SavedExperts, decision: PlacementDecision, world: World) -> bool:
    return saved.hosts == world.size and _first_hosts(saved) == [list(hosts) for hosts in decision.host_of]


def _in_order(
    loads: Sequence[Mapping[str, float]], facts: ModelFacts, layers: Sequence[LayerStructure] | None
) -> list[list[float]]:
    """Return the loads in the order of the experts; none for a layer with an expert that has no load yet."""
    ids = [layer.ids for layer in layers] if layers else [range(len(w)) for w in facts.expert_weights]
    ordered: list[list[float]] = []
    for layer_ids, counts in zip(ids, loads, strict=False):
        known = [counts[str(expert)] for expert in layer_ids if str(expert) in counts]
        ordered.append(known if len(known) == len(layer_ids) else [])
    return ordered


def placement_event(
    decision: PlacementDecision, facts: ModelFacts, layers: Sequence[LayerStructure], step: int
) -> kinds.Placement:
    """Return the event of a placement, with the ids and copies that experts have now."""
    event = decision.event(facts, step)
    placed = []
    for entry, layer in zip(event.layers, layers, strict=True):
        if not layer.is_initial:
            entry = replace(entry, ids=layer.ids)
        if any(len(expert.hosts) > 1 for expert in layer.experts):
            hosts = tuple(expert.hosts for expert in layer.experts)
            entry = replace(entry, host_of=hosts, splits=tuple(expert.split for expert in layer.experts))
        placed.append(entry)
    return replace(event, layers=tuple(placed))


def build_experts(model: nn.Module, layers: Sequence[LayerStructure]) -> None:
    """Give a whole model the experts of saved layers, without their weights."""
    restructure([layer for _, layer in moe_layers(model)], _on_one_host(layers))


def facts_with_experts(facts: ModelFacts, saved: SavedExperts | None) -> ModelFacts:
    """Return the facts of a model with the saved experts in place of those that the task builds."""
    if saved is None or not saved.have_changed:
        return facts
    weights = tuple(
        _expert_weights(layer, before)
        for layer, before in zip(saved.layers, facts.expert_weights, strict=True)
    )
    return replace(facts, expert_weights=weights, experts=max(len(layer) for layer in weights))


def _expert_weights(layer: LayerStructure, before: Sequence[int]) -> tuple[int, ...]:
    """Return the parameters of each expert: they grow with its hidden size alone."""
    known = [(before[expert.id], expert.size) for expert in layer.experts if expert.id < len(before)]
    # If no expert that the task has built is left, use the mean of their parameters.
    weight, size = known[0] if known else (sum(before) // len(before), layer.sizes[0])
    return tuple(weight * expert.size // size for expert in layer.experts)


def _known(known: Mapping[str, Any], saved: SavedExperts | None, plan: Plan, groups: int) -> dict[str, Any]:
    """Return the fields of the earlier plan, with the hosts that the saved experts had last."""
    if saved is None or "placement_asked" not in known:
        return dict(known)
    return {
        **known,
        "placement": _first_hosts(saved),
        "placement_hosts": saved.hosts // groups,
        # A placement file has the experts of the start, without later births and moves.
        "placement_outdated": plan.rebalance.value or plan.evolution_rules is not None,
    }


def _first_hosts(saved: SavedExperts) -> list[list[int]]:
    return [[expert.hosts[0] for expert in layer.experts] for layer in saved.layers]


def _on_one_host(layers: Sequence[LayerStructure]) -> list[LayerStructure]:
    return _on_hosts(layers, [[0] * len(layer.experts) for layer in layers])


def _on_hosts(layers: Sequence[LayerStructure], host_of: Sequence[Sequence[int]]) -> list[LayerStructure]:
    return [layer.on_hosts(hosts) for layer, hosts in zip(layers, host_of, strict=True)]
