"""Builds the evolution of a run's experts, where its plan asks for one."""

from __future__ import annotations

from dataclasses import replace

import torch

from experts.balance import gated_layers, moe_layers
from experts.moe.routed import RoutedExperts
from experts.placement.placement import HostFacts
from experts.rebalance.costs import Cluster
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.planning import Plan
from orchestrator.train.evolution.balancer import FIRST_INTERVAL, HostBalancer, layer_costs
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.evolution.plan import EvolutionPlan, RulesPolicy
from orchestrator.train.loop.training import Training
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.muon import Muon

_VALIDATION_BATCHES = 8
"""Batches that a change is judged on."""
_BYTES_PER_SECOND = {"gloo": 1e9, "nccl": 2e10}
"""The speed of a transfer between two hosts, roughly: it decides whether a move pays."""
_UPDATED_BYTES_PER_SECOND = {"gloo": 4e9, "nccl": 1e12}
"""State of a copy that a CPU core and a GPU update, roughly: it decides whether a copy pays. AdamW with
clipping reaches 8e9 on a core; gradients of copies are packed and added up besides."""
CHANGE_SECONDS = 0.02
"""The cost of a move or copy beside its bytes: hosts wait for each other, and stack experts and optimizer
state anew. Three hosts on two cores took 9 to 37 ms for other shares of copies, which send nothing. A
constant, so that a repeated run decides alike."""
_LEAST_SPEED = 1e10
"""A deterministic run measures no speed: its hosts count as equal."""


def build_evolution(
    training: Training,
    plan: Plan,
    config: Config,
    state: EvolutionState | None,
    hosts: tuple[HostFacts, ...],
    state_bytes: float,
) -> Evolution | None:
    """Return the evolution of the experts; None where they stay as they are, and have no ``state``.

    ``hosts`` are the expert hosts; none unless the run is expert parallel. ``state_bytes`` are those for each
    weight of an expert, as in the placement."""
    model = training.stepper.strategy.model
    layers = [layer for _, layer in moe_layers(model)]
    if state is None or not layers:
        return None
    _check_banks(layers)
    _check_optimizer(training.stepper.optimizer.inner)
    rules = plan.evolution_rules
    if rules is not None and len(gated_layers(model)) < len(layers):
        raise UserError(
            "the model's routers are not ours, and know their number of experts; such experts can move to "
            "other hosts, but none can be born, merged or pruned: use --evolution off"
        )
    balancer = None
    if hosts and (plan.rebalance.value or rules is not None):
        costs = [layer_costs(layer, state_bytes) for layer in layers]
        balancer = HostBalancer(costs, _cluster(plan, hosts))
        state.balance_interval = state.balance_interval or FIRST_INTERVAL
    feed = training.feed

    def steps_left(progress: Progress) -> int | None:
        return feed.steps_from(progress.position)

    evolution_plan = EvolutionPlan(
        seed=config.run.seed,
        steps_left=steps_left,
        sleep_every=config.evolution.sleep_every,
        policy=RulesPolicy(rules) if rules is not None else None,
        balancer=balancer,
        moves=plan.rebalance.value,
        last_step=training.cadence.total_steps,
    )
    judged = None
    if training.evaluation is not None:
        judged = replace(training.evaluation, max_batches=_VALIDATION_BATCHES, name="evolution")
    evolution = Evolution(evolution_plan, training.stepper, training.log, judged, state)
    for evaluation in (training.evaluation, judged):
        if evaluation is not None:
            evolution.on_change(evaluation.experts_changed)
    return evolution


def _cluster(plan: Plan, hosts: tuple[HostFacts, ...]) -> Cluster:
    bandwidth = _BYTES_PER_SECOND.get(plan.backend.value, 1e9)
    update_bandwidth = _UPDATED_BYTES_PER_SECOND.get(plan.backend.value, 4e9)
    counted = tuple(replace(host, speed=max(host.speed, _LEAST_SPEED)) for host in hosts)
    return Cluster(counted, bandwidth, update_bandwidth, CHANGE_SECONDS)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state cannot follow an expert, before the first step."""
    known = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Muon, AdamW8bit)
    if not isinstance(optimizer, known):
        raise UserError(
            f"the optimizer is {type(optimizer).__name__}; experts can change with AdamW, Adam, SGD, "
            "muon and adamw8bit alone: use one of them, or --evolution off --rebalance off"
        )


def _check_banks(layers: list[RoutedExperts]) -> None:
    """Refuse layers that share their experts: a change would have to fit all of them."""
    if len({layer.bank for layer in layers}) < len(layers):
        raise UserError(
            "several layers of the model share one bank of experts; such experts cannot change during "
            "training: use --evolution off --rebalance off"
        )
