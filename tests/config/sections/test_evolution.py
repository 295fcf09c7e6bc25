"""The settings of evolution: their ranges, what contradicts them, and the rules they give."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from experts.evolution.rules import EvolutionRules, preset_rules
from orchestrator.config.sections.evolution import EvolutionSettings
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from tests.config.helpers import read_argv, read_text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sleep_every", -1),
        ("min_experts", 0),
        ("max_experts", 0),
        ("birth_entropy", 1.1),
        ("birth_entropy", math.nan),
        ("birth_overload", 0.9),
        ("birth_overload", math.inf),
        ("birth_patience", 0),
        ("stall_patience", 0),
        ("merge_similarity", -0.1),
        ("prune_below", 1.5),
        ("prune_patience", 0),
        ("newborn_warmup", -1),
        ("change_tolerance", -0.1),
        ("expert_replicas", 0),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{name} is {value}; it must"):
        Config.of(**{name: value})


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"min_experts": 5, "max_experts": 4}, ("min_experts is 5", "max_experts 4")),
        ({"experts": 8, "max_experts": 7}, ("max_experts is 7", "8 experts", "--max-experts 8")),
        ({"experts": 8, "min_experts": 9}, ("min_experts is 9", "8 experts", "--min-experts 8")),
        ({"experts": 0, "evolution": "bold"}, ("evolution is bold", "experts is 0", "leave --evolution out")),
        ({"sharding": "zero2", "evolution": "bold"}, ("evolution bold", "sharding zero2", "leave one")),
        ({"sharding": "zero3", "evolution": "cautious"}, ("evolution cautious", "sharding zero3")),
        ({"cpu_offload": True, "evolution": "bold"}, ("evolution bold", "cpu_offload")),
        ({"rebalance": "on", "expert_replicas": 2}, ("rebalance on", "expert_replicas 2")),
        ({"gate": "primary", "expert_replicas": 2}, ("gate primary", "expert_replicas 2")),
        ({"workers": 3, "expert_replicas": 2}, ("expert_replicas is 2", "workers is 3")),
        (
            {"parallel_strategy": "data_parallel", "expert_replicas": 2},
            ("expert_replicas 2 works with expert_parallel", "data_parallel"),
        ),
        (
            {"parallel_strategy": "data_parallel", "rebalance": "on"},
            ("rebalance on works with expert_parallel", "data_parallel"),
        ),
    ],
)
def test_contradictions_are_refused_with_both_sides(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        Config.of(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_experts": 4, "max_experts": 4, "experts": 4, "evolution": "bold"},
        {"experts": 0, "evolution": "off"},
        {"experts": 0},
        {"sharding": "zero3", "evolution": "off"},
        {"sharding": "zero3"},
        {"sharding": "none", "evolution": "bold"},
        {"workers": 4, "expert_replicas": 2, "parallel_strategy": "expert_parallel"},
        {"workers": 4, "expert_replicas": 4, "rebalance": "off"},
        {"evolution": "bold", "parallel_strategy": "data_parallel"},
    ],
)
def test_settings_that_agree_are_accepted(settings: dict[str, Any]) -> None:
    Config.of(**settings)


def test_off_is_a_word_in_yaml_and_on_is_refused(config_file: Path) -> None:
    """YAML reads off as a truth value."""
    assert read_text(config_file, "evolution: {evolution: off}").config.evolution.evolution == "off"
    with pytest.raises(UserError, match=r"evolution\.evolution is true; 'auto' or 'off'"):
        read_text(config_file, "evolution: {evolution: on}")


def test_flags_need_no_prefix() -> None:
    config = read_argv("--evolution", "bold", "--max-experts", "12", "--rebalance", "--sleep-every=50").config
    assert config == Config.of(evolution="bold", max_experts=12, rebalance="on", sleep_every=50)


THRESHOLDS: dict[str, Any] = {
    "min_experts": 3,
    "max_experts": 11,
    "birth_entropy": 0.31,
    "birth_overload": 3.5,
    "birth_patience": 21,
    "stall_patience": 22,
    "merge_similarity": 0.32,
    "prune_below": 0.33,
    "prune_patience": 23,
    "newborn_warmup": 24,
    "change_tolerance": 0.34,
}


def test_every_threshold_reaches_the_rules() -> None:
    rules = EvolutionSettings(**THRESHOLDS).rules("cautious", 8)
    assert isinstance(rules, EvolutionRules)
    for name, value in THRESHOLDS.items():
        assert getattr(rules, "newborn_warmup_steps" if name == "newborn_warmup" else name) == value


def test_without_thresholds_the_preset_holds() -> None:
    for name in ("off", "cautious", "bold"):
        assert EvolutionSettings().rules(name, 8) == preset_rules(name, 8)


def test_a_longer_warm_up_raises_the_least_age() -> None:
    rules = EvolutionSettings(newborn_warmup=500).rules("bold", 8)
    assert rules is not None
    assert rules.min_age_steps == 1000


def test_given_thresholds_are_named_as_flags() -> None:
    settings = EvolutionSettings(evolution="off", rebalance="on", max_experts=9, sleep_every=5)
    assert settings.given_thresholds() == ["--sleep-every 5", "--max-experts 9"]
    all_given = EvolutionSettings(**THRESHOLDS, sleep_every=1).given_thresholds()
    assert len(all_given) == len(fields(EvolutionSettings)) - 3
