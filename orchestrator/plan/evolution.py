"""Whether experts change during training, the memory for their growth, and their copies. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from experts.evolution.rules import EvolutionRules, Preset
from orchestrator.config.sections.cross_checks import check_expert_limits, divides_experts
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, largest_fitting
from orchestrator.plan.pass_memory import Moment
from orchestrator.plan.reasons import NO_AUTO, set_switch
from orchestrator.plan.workers import one_sample_memory
from orchestrator.types import NOT_USED, Choice, Rejected, bytes_text

_TASK_PRESETS: Mapping[str, Preset] = {"digits": "bold"}
"""The preset of a task for ``--evolution auto``; off for all others."""


@dataclass(frozen=True)
class Growth:
    """The rules by which the experts change, and the model with the most experts that it may get."""

    evolution: Choice[Preset]
    rules: EvolutionRules | None
    largest: ModelFacts

    @classmethod
    def of(cls, config: Config, facts: ModelFacts) -> Growth:
        """Return the growth that the settings ask for, whether or not it fits the memory."""
        evolution = _choose_evolution(config, facts)
        rules = _growth_rules(config, facts, evolution.value)
        return cls(evolution, rules, grown(facts, rules.max_experts) if rules else facts)

    def within(
        self, config: Config, facts: ModelFacts, limit_bytes: float, sharding: ModelSharding
    ) -> Growth:
        """Return the growth that the memory of the workers allows, with its reason."""
        if self.rules is None:
            return self
        rules = _fit_growth(config, facts, self.rules, limit_bytes, sharding)
        text = _growth_text(self.rules, rules, facts, sharding, config)
        evolution = replace(self.evolution, reason=f"{self.evolution.reason}: {text}")
        return Growth(evolution, rules, grown(facts, rules.max_experts))


def _choose_evolution(config: Config, facts: ModelFacts) -> Choice[Preset]:
    """Choose the preset of the rules by which experts are born, merged and pruned."""
    mode = config.evolution.evolution
    if not facts.experts:
        if mode in ("cautious", "bold"):
            raise UserError(
                f"--evolution {mode} changes the experts of a model, and this model has none; leave it out, "
                "or add experts: --experts N for the built-in tasks, MoELayer (experts/moe/layer.py) in your "
                "own model"
            )
        return Choice("off", f"{NOT_USED}the model has no experts")
    if mode in ("cautious", "bold") and config.task == "lm":
        raise UserError(
            f"--evolution {mode}: the routers of a language model know their number of experts; its experts "
            "can move to other hosts (--rebalance on), but none can be born, merged or pruned: leave it out"
        )
    if mode != "auto":
        return Choice(mode, f"set by --evolution {mode}")
    if not config.run.auto:
        return Choice("off", NO_AUTO)
    if config.task == "lm":
        return Choice("off", "the routers of a language model know their number of experts")
    preset = _TASK_PRESETS.get(config.task, "off")
    if preset == "off":
        return Choice("off", "the experts stay as they are; ask for changes with --evolution cautious")
    if config.evolution.expert_replicas > 1:
        in_one_group = Rejected(preset, "a newborn expert would be in one group alone")
        return Choice("off", "--expert-replicas keeps every expert in each group", (in_one_group,))
    divided = divides_experts(config.parallel)
    if divided is not None:
        return Choice(
            "off", f"{divided} divides the weights of experts", (Rejected(preset, "needs them whole"),)
        )
    return Choice(
        preset, f"the task {config.task} shows it", (Rejected("off", "set it with --evolution off"),)
    )


def _growth_rules(config: Config, facts: ModelFacts, preset: Preset) -> EvolutionRules | None:
    """Return the rules of evolution for a model, whatever its memory; None if it is off."""
    if preset == "off":
        return None
    try:
        check_expert_limits(config.evolution, facts.experts)
    except ValueError as error:
        raise UserError(str(error)) from None
    return config.evolution.rules(preset, facts.experts)


def grown(facts: ModelFacts, experts: int) -> ModelFacts:
    """Return the facts of the model with so many experts in each layer, if it has fewer.

    New experts count as large as the largest one of their layer, and as trained."""
    if experts <= facts.experts:
        return facts
    layers = facts.expert_weights
    if layers:
        new_weights = sum((experts - len(weights)) * max(weights) for weights in layers)
        growth = experts * len(layers) / sum(map(len, layers))
    else:
        growth = experts / facts.experts
        new_weights = round(facts.expert_parameters * (growth - 1))
    new_gate = round(facts.gate_parameters * (growth - 1))
    new_parameters = new_weights + new_gate
    return replace(
        facts,
        parameters=facts.parameters + new_parameters,
        trainable=facts.trainable + new_parameters,
        expert_parameters=facts.expert_parameters + new_weights,
        gate_parameters=facts.gate_parameters + new_gate,
        experts=experts,
        # Mostly copies of weights in low precision, and gradients.
        passes=facts.passes.changed(partial(_grown, factor=experts / facts.experts)),
        expert_update_bytes=facts.expert_update_bytes * experts / facts.experts,
        large_experts=round(facts.large_experts * (1 + new_weights / max(1, facts.expert_parameters))),
    )


def _grown(moment: Moment, factor: float) -> Moment:
    return moment._replace(
        expert_base=factor * moment.expert_base,
        expert_gradients=factor * moment.expert_gradients,
    )


def change_memory(config: Config, facts: ModelFacts, sharding: ModelSharding) -> float:
    """Return the memory of a device during a change of its largest layer.

    The layer's experts and their optimizer state exist before and after it, so that it can be undone. It
    happens between two steps, when there are no activations."""
    layers = [max(facts.experts, len(weights)) * max(weights) for weights in facts.expert_weights]
    layer = max(layers) if layers else facts.expert_parameters // max(1, facts.moe_layers)
    without_layer = replace(
        facts,
        parameters=facts.parameters - layer,
        trainable=max(0, facts.trainable - layer),
        expert_parameters=facts.expert_parameters - layer,
    )
    state = _state_bytes(config, facts, sharding)
    return state + state - _state_bytes(config, without_layer, sharding)


def _state_bytes(config: Config, facts: ModelFacts, sharding: ModelSharding) -> float:
    estimate = one_sample_memory(config, facts, float("inf"), sharding)
    return estimate.total - estimate.activations


def _fit_growth(
    config: Config, facts: ModelFacts, rules: EvolutionRules, limit_bytes: float, sharding: ModelSharding
) -> EvolutionRules:
    """Lower the largest number of experts to one that fits, if memory is short.

    One sample must fit, and a change of a layer."""

    def fits(experts: int) -> bool:
        largest = grown(facts, experts)
        step_fits = one_sample_memory(config, largest, limit_bytes, sharding).fits
        return step_fits and change_memory(config, largest, sharding) <= limit_bytes

    fitting = max(facts.experts, largest_fitting(fits, rules.max_experts))
    return replace(rules, max_experts=fitting)


def _growth_text(
    asked: EvolutionRules, rules: EvolutionRules, facts: ModelFacts, sharding: ModelSharding, config: Config
) -> str:
    """Return the limits of the number of experts, and the memory that is kept for growth."""
    largest = grown(facts, rules.max_experts)
    now = one_sample_memory(config, facts, float("inf"), sharding).total
    then = one_sample_memory(config, largest, float("inf"), sharding).total
    limits = f"{rules.min_experts} to {rules.max_experts} experts per layer, {facts.experts} at the start"
    if rules.max_experts < asked.max_experts:
        limits += f"; memory does not allow {asked.max_experts}"
    every = config.evolution.sleep_every
    when = f"every {every} steps" if every else "at the end of each epoch"
    return f"{limits}; judged {when}; {bytes_text(then - now)} are kept for new ones"


def choose_replicas(config: Config, unused: str | None, workers: int) -> Choice[int]:
    """Choose the groups of hosts that hold every expert."""
    replicas = config.evolution.expert_replicas
    if unused:
        return Choice(1, unused + (f", instead of --expert-replicas {replicas}" if replicas > 1 else ""))
    if replicas == 1:
        return Choice(1, "each expert is on one host")
    if workers % replicas:
        raise UserError(
            f"--expert-replicas {replicas} makes groups of equal size, and {workers} hosts cannot be divided "
            "so; give --workers that it divides, or another number"
        )
    return Choice(
        replicas, f"set by --expert-replicas {replicas}: each group has {workers // replicas} hosts"
    )


def choose_rebalance(config: Config, unused: str | None, workers: int, evolution: Preset) -> Choice[bool]:
    """Choose whether experts move between hosts, and are copied, when the load is uneven."""
    if unused:
        instead = ", instead of --rebalance on" if config.evolution.rebalance == "on" else ""
        return Choice(False, unused + instead)
    if workers == 1:
        return Choice(False, "one host has all experts")
    if config.parallel.gate == "primary":
        return Choice(False, "with --gate primary all tokens come from one host, which would keep its own")
    switch = set_switch(config.evolution.rebalance, "--rebalance")
    if switch is not None:
        return switch
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if config.evolution.expert_replicas > 1:
        return Choice(False, "every group keeps one copy of each expert (--expert-replicas)")
    if evolution == "off":
        return Choice(False, "experts stay on their hosts while evolution is off; try --rebalance on")
    return Choice(True, "evolution changes the load of the hosts", (Rejected("off", "hosts would wait"),))


def unused_thresholds(config: Config, evolution: Preset) -> str | None:
    """Return a message about given thresholds that have no effect; None if there are none."""
    given = config.evolution.given_thresholds()
    if not given or evolution != "off":
        return None
    verb = "is" if len(given) == 1 else "are"
    return f"{', '.join(given)} {verb} not used: evolution is off; add --evolution cautious or bold"
