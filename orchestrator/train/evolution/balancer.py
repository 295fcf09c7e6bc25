"""The decisions on moves and copies of experts, by the rules of ``experts.rebalance``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from experts.moe.routed import RoutedExperts
from experts.rebalance.costs import Cluster, LayerCosts
from experts.rebalance.decisions import BalanceRules, cheapest_host, decide, layer_imbalance
from experts.rebalance.load_history import MAX_WINDOWS, LoadHistory
from experts.structure import Change, LayerStructure
from orchestrator.checkpoint.saved_experts import EvolutionState

_PASSES = 3  # products of a training step, in multiples of the forward pass
_FLOPS = 2  # per weight and row, forward
_VALUE_BYTES = 4

FIRST_INTERVAL = 5
"""Steps from one decision to the next at the start, and after a change."""
_MAX_INTERVAL = 80


def layer_costs(layer: RoutedExperts, state_bytes: float) -> LayerCosts:
    """Return the costs of a layer's experts, per unit of their hidden size.

    ``state_bytes`` are those of one weight, with its gradient and the optimizer's state."""
    bank = layer.bank
    matrices = 3 if bank.kind == "swiglu" else 2
    weights = bank.width * matrices
    # Beside adapters the weights are frozen: copies send the gradients of the adapters alone.
    trained_roles = bank.form.adapters.roles if bank.form.adapters else bank.form.roles
    size = max(bank.sizes)
    trained = sum(prod(bank.form.shape(role, bank.width, size)) for role in trained_roles) / size
    return LayerCosts(
        row_flops=_PASSES * _FLOPS * weights,
        state_bytes=state_bytes * weights,
        gradient_bytes=_VALUE_BYTES * trained,
    )


@dataclass(frozen=True)
class HostBalancer:
    """Decides by the loads of recent steps where experts live, and which have copies.

    Only the main worker asks it. Its memory is in the state of evolution."""

    costs: Sequence[LayerCosts]
    cluster: Cluster
    rules: BalanceRules = field(default_factory=BalanceRules)

    def decide(
        self,
        layers: Sequence[LayerStructure],
        loads: Sequence[Sequence[int]],
        state: EvolutionState,
        steps_left: float,
    ) -> list[Change]:
        """Return the moves and copies after a step with these tokens per expert.

        They win back their costs in the steps that are left of the run."""
        histories = [
            history.observed(layer.ids, counts, 1)
            for layer, counts, history in zip(layers, loads, self._histories(layers, state), strict=True)
        ]
        rules = replace(self.rules, max_steps=min(self.rules.max_steps, steps_left))
        changes = decide(layers, histories, self.costs, self.cluster, rules)
        state.balance = {layer.name: h.to_json() for layer, h in zip(layers, histories, strict=True)}
        return list(changes)

    def next_interval(self, layers: Sequence[LayerStructure], state: EvolutionState, changed: bool) -> int:
        """Return the steps until the next decision: the longer nothing has changed, the more.

        A layer that has been uneven for a few windows is looked at again soon: its loads may have shifted.
        A layer that has been uneven for long cannot be improved."""
        histories = self._histories(layers, state)
        number_uneven = [
            self._num_uneven(*entry) for entry in zip(layers, histories, self.costs, strict=True)
        ]
        if changed or any(0 < number < MAX_WINDOWS for number in number_uneven):
            return FIRST_INTERVAL
        return min(2 * state.balance_interval, _MAX_INTERVAL)

    def _num_uneven(self, layer: LayerStructure, history: LoadHistory, costs: LayerCosts) -> int:
        """Return the number of uneven windows up to the newest one; 0 if that is even."""
        number = 0
        for window in reversed(history.windows):
            if layer_imbalance(layer, window.loads, costs, self.cluster) <= self.rules.max_imbalance:
                break
            number += 1
        return number

    def newborn_host(self, layers: Sequence[LayerStructure], change: Change, state: EvolutionState) -> int:
        """Return the host that a newborn expert costs least on."""
        history = self._histories(layers, state)[change.layer]
        costs = self.costs[change.layer]
        assert change.size is not None
        # The newborn expert will take half of its parent's tokens, or an even share of all.
        tokens = sum(history.mean) / max(1, len(history.ids)) if history.windows else 1.0
        newborn = costs.expert(change.size, tokens)
        host = cheapest_host(layers, change.layer, newborn, history, self.costs, self.cluster)
        parents = [layers[change.layer].expert(parent).hosts[0] for parent in change.parents]
        return host if host is not None else (parents or [0])[0]

    def _histories(self, layers: Sequence[LayerStructure], state: EvolutionState) -> list[LoadHistory]:
        saved: dict[str, Any] = state.balance or {}
        return [
            LoadHistory.from_json(saved[layer.name]) if layer.name in saved else LoadHistory()
            for layer in layers
        ]
