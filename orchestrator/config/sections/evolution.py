"""Settings of experts that are born, merged, pruned, moved and copied during training."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from experts.evolution.rules import EvolutionRules, Preset, preset_rules
from orchestrator.config.sections.checks import Switch, at_least, within
from orchestrator.types import flag_of

EvolutionMode = Literal["auto", "off", "cautious", "bold"]


@dataclass(frozen=True)
class EvolutionSettings:
    """Experts that are born, merged and pruned during training, and that move between hosts. A window is the
    time between two sleeps; a threshold without a value is the preset's."""

    evolution: EvolutionMode = "auto"
    """Preset of the thresholds below: off keeps the experts as they are, cautious changes few of them and
    waits long, bold changes more and sooner. auto: by the plan, off unless the task shows it."""
    sleep_every: int = 0
    """Steps between two sleeps, at which experts are judged and changed; 0: at the end of each epoch."""
    min_experts: int | None = None
    """Merging and pruning leave at least this many experts in a layer."""
    max_experts: int | None = None
    """Most experts of a layer; the plan keeps memory for them."""
    birth_entropy: float | None = None
    """Split the most used expert if the gate's entropy stays above this; 1 is an even choice among all
    experts."""
    birth_overload: float | None = None
    """Split an expert whose share of the tokens stays above this multiple of the even share."""
    birth_patience: int | None = None
    """Windows in a row that the gate must be uncertain, or an expert overloaded, before a birth."""
    stall_patience: int | None = None
    """Windows in a row without improvement of the training loss before a fresh expert is added."""
    merge_similarity: float | None = None
    """Merge two experts if their weights and their responses are at least this similar (cosine)."""
    prune_below: float | None = None
    """Prune an expert whose share of the tokens stays below this fraction of the even share; 0: never."""
    prune_patience: int | None = None
    """Windows in a row that an expert must be dormant before it is pruned."""
    newborn_warmup: int | None = None
    """Steps in which a newborn expert gains its share of the tokens."""
    change_tolerance: float | None = None
    """Undo a change that raises the validation loss by more than this fraction."""
    rebalance: Switch = "auto"
    """Expert parallel: move and copy experts between hosts if their load is uneven. auto: if evolution
    is on and there are no expert groups."""
    expert_replicas: int = 1
    """Expert parallel: groups of hosts that each hold every expert once; tokens stay within a group. It
    must divide the number of hosts; where one is lost, the others form as many groups as divide them."""

    def __post_init__(self) -> None:
        for name in ("min_experts", "max_experts", "birth_patience", "stall_patience", "prune_patience"):
            at_least(name, getattr(self, name), 1)
        for name in ("sleep_every", "newborn_warmup", "change_tolerance"):
            at_least(name, getattr(self, name), 0)
        for name in ("birth_entropy", "merge_similarity", "prune_below"):
            value = getattr(self, name)
            if value is not None:
                within(name, value, 0, 1)
        at_least("birth_overload", self.birth_overload, 1)
        at_least("expert_replicas", self.expert_replicas, 1)
        if self.min_experts and self.max_experts and self.min_experts > self.max_experts:
            raise ValueError(
                f"min_experts is {self.min_experts}, more than max_experts {self.max_experts}; "
                "lower --min-experts or raise --max-experts"
            )

    def rules(self, preset: Preset, experts: int) -> EvolutionRules | None:
        """Return the rules of a preset, with the given thresholds; None if it is off.

        ``experts`` is the largest number of experts of a layer at the start, within the limits."""
        rules = preset_rules(preset, experts)
        if rules is None:
            return None
        thresholds = {
            "min_experts": self.min_experts,
            "max_experts": self.max_experts,
            "birth_entropy": self.birth_entropy,
            "birth_overload": self.birth_overload,
            "birth_patience": self.birth_patience,
            "stall_patience": self.stall_patience,
            "merge_similarity": self.merge_similarity,
            "prune_below": self.prune_below,
            "prune_patience": self.prune_patience,
            "newborn_warmup_steps": self.newborn_warmup,
            "change_tolerance": self.change_tolerance,
        }
        given: dict[str, Any] = {name: value for name, value in thresholds.items() if value is not None}
        rules = replace(rules, **given)
        # An expert is judged only when it has been trained for as long as its warm-up lasted.
        return replace(rules, min_age_steps=max(rules.min_age_steps, 2 * rules.newborn_warmup_steps))

    def given_thresholds(self) -> list[str]:
        """Return the given settings, as flags, that have an effect only while experts change."""
        others = ("evolution", "rebalance", "expert_replicas")
        return [
            f"{flag_of(field.name)} {getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in others and getattr(self, field.name) != field.default
        ]
