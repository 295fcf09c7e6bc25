"""When experts may change during a run, and the policies that decide it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from experts.evolution.decisions import after_undo, decide, why_undo
from experts.evolution.rules import EvolutionRules
from experts.evolution.views import LayerView, PolicyState, RunView
from experts.structure import Change, LayerStructure
from orchestrator.checkpoint.evolution_state import EvolutionState
from orchestrator.checkpoint.progress import Progress


class Policy(Protocol):
    """Decides which experts are born, merged and pruned. Only the main worker asks it."""

    def decide(self, layers: Sequence[LayerView], state: EvolutionState, step: int) -> list[Change]: ...

    def why_undo(self, loss_before: float, loss_after: float) -> str | None: ...

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None: ...


class Balancer(Protocol):
    """Decides where experts live, and which have copies. Only the main worker asks it."""

    def decide(
        self,
        layers: Sequence[LayerStructure],
        loads: Sequence[Sequence[int]],
        state: EvolutionState,
        steps_left: float,
    ) -> list[Change]: ...

    def next_interval(
        self, layers: Sequence[LayerStructure], state: EvolutionState, changed: bool
    ) -> int: ...

    def newborn_host(
        self, layers: Sequence[LayerStructure], change: Change, state: EvolutionState
    ) -> int: ...


@dataclass(frozen=True)
class EvolutionPlan:
    """When experts may change, and the policies that decide it."""

    seed: int
    steps_left: Callable[[Progress], int | None]
    """Returns the steps that are left of an epoch; None for some, where the data does not tell."""
    sleep_every: int = 0
    """Steps between two decisions on births, merges and prunes; 0: at the end of each epoch."""
    policy: Policy | None = None
    balancer: Balancer | None = None
    moves: bool = False
    """Whether experts move and are copied; else the balancer only places newborn ones."""
    last_step: int | None = None
    """The step at which the run ends; None where that is not known. Moves must pay until then."""


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
