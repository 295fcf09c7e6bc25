"""Facts of a model, found without computing anything."""

from __future__ import annotations

import pytest

from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.tasks.load import load_task


@pytest.mark.parametrize(("capacity", "limited"), [(None, False), (1.25, True)])
def test_a_capacity_of_experts_is_a_fact_of_the_model(capacity: float | None, limited: bool) -> None:
    task = load_task(Config.of(task="digits", experts=4, width=16, capacity_factor=capacity))
    assert model_facts(task, "cpu", "fp32").limits_capacity is limited
