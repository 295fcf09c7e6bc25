"""The decisions on births, merges and prunes, by the rules of ``experts.evolution``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.evolution.decisions import after_undo, decide, why_undo
from experts.evolution.rules import EvolutionRules
from experts.evolution.views import LayerView, PolicyState, RunView
from experts.structure import Change
from orchestrator.checkpoint.evolution_state import EvolutionState


@dataclass(frozen=True)
class RulesPolicy:
    """Decides by rules. Its memory is in the state of evolution, so that a resumed run decides the same."""

    rules: EvolutionRules
    most_experts: int | None = None
    """Experts per layer that fit into memory; None if it sets no limit."""

    def decide(self, layers: Sequence[LayerView], state: EvolutionState, step: int) -> list[Change]:
        view = RunView(step, tuple(state.losses), tuple(layers), self.most_experts)
        decision = decide(view, _memory(state), self.rules)
        state.policy = decision.state.to_json()
        return list(decision.changes)

    def why_undo(self, loss_before: float, loss_after: float) -> str | None:
        return why_undo(loss_before, loss_after, self.rules)

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None:
        state.policy = after_undo(_memory(state), layer_name, change, step, self.rules).to_json()


def _memory(state: EvolutionState) -> PolicyState:
    return PolicyState() if state.policy is None else PolicyState.from_json(state.policy)
