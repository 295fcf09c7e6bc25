"""The sizes of the settings are those of the built-in models and their data."""

from __future__ import annotations

from typing import Any

import pytest

from experts.balance import gated_layers
from orchestrator.config.settings import Config
from orchestrator.tasks.load import load_task

SIZES: dict[str, Any] = {"width": 12, "layers": 3, "experts": 5, "expert_hidden_size": (6,), "top_k": 4}


@pytest.mark.parametrize(
    ("task", "given"),
    [("digits", {}), ("text", {"sequence_length": 7}), ("synthetic", {"sequence_length": 7, "samples": 9})],
)
def test_settings_are_the_sizes_of_a_built_in_task(task: str, given: dict[str, Any]) -> None:
    built: Any = load_task(Config.of(task=task, **SIZES, **given))
    model = built.build_model()
    layers = [layer for _, layer in gated_layers(model)]
    assert [layer.top_k for layer in layers] == [4] * 3
    for layer in layers:
        assert [expert.size for expert in layer.structure.experts] == [6] * 5
        assert layer.gate.weight_ED.shape == (5, 12)
    if given:
        assert model.position.weight.shape == (7, 12)
    if "samples" in given:
        assert len(built.train_data()) == 9
