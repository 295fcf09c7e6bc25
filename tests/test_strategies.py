"""Tests of the table of strategies: it has each strategy once, and damaged records find none."""

from __future__ import annotations

from typing import get_args

import pytest

from orchestrator.config.sections.parallel import ParallelStrategy
from orchestrator.strategies import EXPERT_PARALLEL, STRATEGIES, StrategyName, recorded_strategy


def test_each_strategy_has_facts_under_its_name() -> None:
    assert tuple(STRATEGIES) == get_args(StrategyName)
    assert all(facts.name == name for name, facts in STRATEGIES.items())
    assert set(get_args(ParallelStrategy)) - {"auto"} <= set(STRATEGIES)


@pytest.mark.parametrize("name", [None, "tensor_parallel", ["expert_parallel"], {}], ids=str)
def test_a_record_with_another_name_has_no_strategy(name: object) -> None:
    assert recorded_strategy(name) is None
    assert recorded_strategy("expert_parallel") is EXPERT_PARALLEL
