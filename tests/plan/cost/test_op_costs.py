"""Device seconds of single products."""

from __future__ import annotations

import pytest

from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.op_costs import product_seconds
from orchestrator.plan.cost.ops import ProductOp
from tests.support.cost_machines import FLOPS_PER_S, device


def test_grouped_products_run_together_or_one_after_another():
    experts = ProductOp(10, 20, 30, "nn", batch=4, of_experts=True)
    arithmetic_s = experts.flops / FLOPS_PER_S
    assert product_seconds(experts, device()) == pytest.approx(arithmetic_s)
    slow_group = device(grouped=PiecewiseCurve((1.0,), (1.5,)))
    assert product_seconds(experts, slow_group) == pytest.approx(1.5 * arithmetic_s, rel=0.01)
    one_by_one = product_seconds(experts, device(grouped=None, group_s=1e-3))
    assert one_by_one == pytest.approx(4e-3 + arithmetic_s, rel=0.01)


def test_the_weight_gradient_of_experts_has_their_rows_as_inner_size():
    """In layout ``tn`` k counts the rows of each expert."""
    gradient = ProductOp(20, 10, 30, "tn", batch=4, of_experts=True)
    assert product_seconds(gradient, device()) == pytest.approx(gradient.flops / FLOPS_PER_S)


def test_unaligned_sizes_have_their_measured_slowdown():
    odd = ProductOp(64, 64, 65)
    even = ProductOp(64, 64, 64)
    slow = device(unaligned={"fp32": {"nn": 3.0}})
    assert product_seconds(odd, slow) == pytest.approx(3 * product_seconds(odd, device()))
    assert product_seconds(even, slow) == pytest.approx(product_seconds(even, device()))
