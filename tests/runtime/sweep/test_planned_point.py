"""Test of the beginning of a search."""

from __future__ import annotations

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.runtime.sweep.planned_point import planned_point
from orchestrator.trainer import Trainer


def test_a_search_begins_next_to_the_plan() -> None:
    config = Config.of(batch_size=48)
    plan = Trainer(config=config).prepare().plan
    space = parse_space(
        [
            "batch-size=16,64",
            "precision=bf16,fp32",
            "learning-rate=1e-3..1e-2",
            "accumulation-steps=1..8",
            "compile=on,off",
        ]
    )
    assert planned_point(space, config, plan) == {
        "batch_size": 64,
        "precision": "fp32",
        "learning_rate": 3e-3,
        "accumulation_steps": 1,
        "compile": "off",
    }
