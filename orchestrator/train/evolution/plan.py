"""When experts may change during a run, and the policy that decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experts.evolution.decisions import after_undo, decide, why_undo
from experts.evolution.rules import EvolutionRules
from experts.evolution.views import LayerView, PolicyState, RunView
from experts.structure import Change
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.train.evolution.balancer import HostBalancer


@dataclass(frozen=True)
class EvolutionPlan:
    """When experts may change, and the policies that decide it."""

    seed: int
    steps_left: Callable[[Progress], int | None]
    """Returns the steps that are left of an epoch; None for some, where the data does not tell."""
    sleep_every: int = 0
    """Steps between two decisions on births, merges and prunes; 0: at the end of each epoch."""
    policy: RulesPolicy | None = None
    balancer: HostBalancer | None = None
    moves: bool = False
    """Whether experts move and are copied; else the balancer only places newborn ones."""
    last_step: int | None = None
    """The step at which the run ends; None where that is not known. Moves must pay until then."""


class RulesPolicy:
    """Decides by rules which experts are born, merged and pruned. Only the main worker asks it.

    Its memory is in the state of evolution, so that a resumed run decides the same."""

    def __init__(self, rules: EvolutionRules) -> None:
        self._rules = rules

    def decide(self, layers: Sequence[LayerView], state: EvolutionState, step: int) -> list[Change]:
        view = RunView(step, tuple(state.losses), tuple(layers))
        decision = decide(view, _memory(state), self._rules)
        state.policy = decision.state.to_json()
        return list(decision.changes)

    def why_undo(self, loss_before: float, loss_after: float) -> str | None:
        return why_undo(loss_before, loss_after, self._rules)

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None:
        state.policy = after_undo(_memory(state), layer_name, change, step, self._rules).to_json()


def _memory(state: EvolutionState) -> PolicyState:
    return PolicyState() if state.policy is None else PolicyState.from_json(state.policy)
