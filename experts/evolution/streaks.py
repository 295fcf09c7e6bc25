"""How long each sign for a change has lasted: uncertain routing, overloaded and dormant experts, a stalled
loss. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from experts.evolution.rules import EvolutionRules
from experts.evolution.views import ExpertView, LayerState, LayerView, PolicyState, RunView


def observe(view: RunView, state: PolicyState, rules: EvolutionRules) -> PolicyState:
    """Return the state after one more window."""
    layers = {
        layer.name: _observe_layer(layer, state.layers.get(layer.name, LayerState()), view.step, rules)
        for layer in view.layers
    }
    return _observe_loss(replace(state, layers=layers), view.losses, rules)


def shows_enough(layer: LayerView, rules: EvolutionRules) -> bool:
    """Whether a layer saw enough tokens in the window to judge its experts."""
    return layer.tokens >= rules.min_tokens_per_expert * len(layer.experts)


def smoothed(losses: tuple[float, ...], rules: EvolutionRules) -> float:
    """Return the mean loss of the last windows."""
    recent = losses[-rules.smoothed_windows :]
    return sum(recent) / len(recent) if recent else math.nan


def _observe_layer(layer: LayerView, state: LayerState, step: int, rules: EvolutionRules) -> LayerState:
    ids = {expert.id for expert in layer.experts}
    barred = {key: until for key, until in state.barred.items() if key in ids and step < until}
    state = replace(state, barred=barred)
    if not shows_enough(layer, rules):
        return state
    dormant_below = rules.prune_below * layer.even_share
    overloaded_above = rules.birth_overload * layer.even_share
    dormant = _streaks(layer, state.dormant, lambda expert: expert.share < dormant_below)
    if any(expert.warming for expert in layer.experts):
        # A newborn in warm-up may be the remedy, so the signs for another birth do not count.
        return replace(state, uncertain=0, overloaded={}, dormant=dormant)
    overloaded = _streaks(layer, state.overloaded, lambda expert: expert.share > overloaded_above)
    uncertain = len(layer.experts) > 1 and layer.entropy > rules.birth_entropy
    return replace(
        state, uncertain=state.uncertain + 1 if uncertain else 0, overloaded=overloaded, dormant=dormant
    )


def _streaks(
    layer: LayerView, before: Mapping[int, int], holds: Callable[[ExpertView], bool]
) -> dict[int, int]:
    """Return the streaks of the experts for which a condition holds. Warm-up does not count."""
    return {
        expert.id: before.get(expert.id, 0) + 1
        for expert in layer.experts
        if not expert.warming and holds(expert)
    }


def _observe_loss(state: PolicyState, losses: tuple[float, ...], rules: EvolutionRules) -> PolicyState:
    loss = smoothed(losses, rules)
    if not math.isfinite(loss):
        return state
    best = state.best_loss
    if best is None or loss < best - rules.stall_improvement * abs(best):
        return replace(state, best_loss=loss, stalled=0)
    return replace(state, stalled=state.stalled + 1)
