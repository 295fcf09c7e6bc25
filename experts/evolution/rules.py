"""The thresholds of the decisions that change a layer's experts, and the presets of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Preset = Literal["off", "cautious", "bold"]

_DIVERGENCE_WARMUPS = 12
"""Warm-ups that a copy needs to become different from its parent. With 4 the digits merged most of their
splits at the next sleep."""


@dataclass(frozen=True)
class EvolutionRules:
    """When experts are born, merged and pruned.

    A window is the time between two decisions. The even share is one part in the number of experts."""

    min_experts: int
    """Merging and pruning leave at least this many experts in a layer."""
    max_experts: int
    """No expert is born in a layer that has this many."""
    birth_entropy: float = 0.9
    """Routing is uncertain above this entropy of the gate; 1 is the entropy of an even choice."""
    birth_overload: float = 2.0
    """An expert is overloaded above this multiple of the even share."""
    birth_patience: int = 3
    """Windows in a row that routing must be uncertain, or an expert overloaded, before a birth."""
    stall_improvement: float = 0.01
    """The loss has improved if it fell by more than this fraction of its best value."""
    stall_patience: int = 5
    """Windows in a row without improvement of the loss before a birth."""
    smoothed_windows: int = 3
    """The loss that is compared is the mean over this many windows."""
    merge_similarity: float = 0.95
    """Two experts are similar if both their weights and their responses are at least this similar."""
    prune_below: float = 0.05
    """An expert is dormant below this fraction of the even share."""
    prune_patience: int = 4
    """Windows in a row that an expert must be dormant before it is pruned."""
    min_age_steps: int = 200
    """A younger expert is neither split nor merged nor pruned."""
    newborn_warmup_steps: int = 100
    """Steps in which a newborn expert gains its share of the tokens."""
    cool_down_steps: int = 100
    """After a change a layer is not changed again for this many steps, so that the effect is seen."""
    retry_steps: int = 1000
    """The experts of a change that was undone take part in no other change for this many steps."""
    min_tokens_per_expert: int = 20
    """A window in which a layer saw fewer tokens per expert shows nothing about that layer."""
    max_changes: int = 1
    """Most births, merges and prunes of a layer at one decision."""
    change_tolerance: float = 0.01
    """A change is undone if it raises the validation loss by more than this fraction."""

    @property
    def divergence_steps(self) -> int:
        """Steps after a split in which the newborn expert is not merged.

        It begins as a copy of its parent: a merge would only undo the split."""
        return _DIVERGENCE_WARMUPS * self.newborn_warmup_steps

    def __post_init__(self) -> None:
        if not 1 <= self.min_experts <= self.max_experts:
            raise ValueError(
                f"min_experts is {self.min_experts} and max_experts {self.max_experts}; "
                "1 <= min_experts <= max_experts is needed"
            )
        for name in ("birth_patience", "stall_patience", "smoothed_windows", "prune_patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least one window is needed")


def preset_rules(name: Preset, experts: int) -> EvolutionRules | None:
    """Return the rules of a preset for layers that begin with this many experts; None for ``off``."""
    match name:
        case "off":
            return None
        case "cautious":
            least = min(experts, max(2, (experts + 1) // 2))
            return EvolutionRules(min_experts=least, max_experts=experts + (experts + 1) // 2)
        case "bold":
            return EvolutionRules(
                min_experts=min(2, experts),
                max_experts=2 * experts,
                birth_entropy=0.8,
                birth_overload=1.5,
                birth_patience=2,
                stall_patience=3,
                merge_similarity=0.9,
                prune_below=0.2,
                prune_patience=2,
                min_age_steps=50,
                newborn_warmup_steps=25,
                cool_down_steps=25,
                retry_steps=200,
                max_changes=2,
                change_tolerance=0.03,
            )
