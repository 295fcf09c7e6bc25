"""The presets of the rules, and rules that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experts.evolution.rules import EvolutionRules, preset_rules
from harness.moe.evolution import (
    RULES,
)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 7, 64])
def test_presets_leave_room_on_both_sides(experts: int) -> None:
    assert preset_rules("off", experts) is None
    cautious = preset_rules("cautious", experts)
    bold = preset_rules("bold", experts)
    assert cautious is not None
    assert bold is not None
    assert bold.min_experts <= cautious.min_experts <= experts < cautious.max_experts <= bold.max_experts


def test_rules_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="min_experts is 5 and max_experts 4"):
        EvolutionRules(min_experts=5, max_experts=4)
    with pytest.raises(ValueError, match="birth_patience is 0"):
        replace(RULES, birth_patience=0)
