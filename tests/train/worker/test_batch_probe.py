"""The memory that a measured batch size leaves free."""

from __future__ import annotations

import pytest

from orchestrator.plan.estimate import estimate_memory
from orchestrator.plan.evolution import grown
from orchestrator.train.worker.batch_probe import _growth_bytes
from tests.support.inventories import gpu, machine, model, planned


def test_memory_is_left_for_experts_that_may_be_born() -> None:
    facts = model()
    assert _growth_bytes(planned(machine(gpu()), facts), facts) == 0
    plan = planned(machine(gpu()), facts, evolution="bold", max_experts=12)
    now = estimate_memory(facts, 1, False, None).total
    then = estimate_memory(grown(facts, 12), 1, False, None).total
    assert _growth_bytes(plan, facts) == pytest.approx(then - now)
    assert then - now > 16 * 300_000
