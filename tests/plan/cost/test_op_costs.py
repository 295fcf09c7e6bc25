"""Device seconds of single operations."""

from __future__ import annotations

import pytest

from harness.fakes.cost_machines import BANDWIDTH, FLOOR_S, FLOPS_PER_S, device
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.model import attention_seconds, move_seconds, product_seconds
from orchestrator.plan.cost.ops import AttentionOp, MoveOp, ProductLayout, ProductOp


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


def constant_grid(seconds: float) -> PiecewiseGrid:
    return PiecewiseGrid((100.0,), (100.0,), (100.0,), (seconds,))


def test_a_product_uses_the_grid_of_its_precision_and_layout():
    grids = {
        "fp32": {"nn": constant_grid(1.0), "nt": constant_grid(2.0)},
        "tf32": {"nn": constant_grid(3.0)},
        "bf16": {"nn": constant_grid(4.0)},
    }
    several = device(products=grids)
    fp32 = ProductOp(8, 8, 8)
    assert product_seconds(fp32, several) == pytest.approx(1.0)
    assert product_seconds(ProductOp(8, 8, 8, "nt"), several) == pytest.approx(2.0)
    assert product_seconds(ProductOp(8, 8, 8, "tn"), several) == pytest.approx(1.0), "the first known layout"
    assert product_seconds(fp32, several, tf32=True) == pytest.approx(3.0)
    bf16 = ProductOp(8, 8, 8, precision="bf16")
    assert product_seconds(bf16, several, tf32=True) == pytest.approx(4.0)
    fp16 = ProductOp(8, 8, 8, precision="fp16")
    assert product_seconds(fp16, several) == pytest.approx(1.0), "an unknown precision runs in fp32"


@pytest.mark.parametrize(
    ("layout", "sizes", "is_slow"),
    [
        ("nn", (63, 64, 64), False),
        ("nn", (64, 63, 64), True),
        ("nn", (64, 64, 63), True),
        ("tn", (63, 64, 64), True),
        ("tn", (64, 63, 64), False),
        ("tn", (64, 64, 63), True),
        ("nt", (64, 60, 64), False),
    ],
)
def test_only_sizes_along_rows_of_memory_need_alignment(
    layout: ProductLayout, sizes: tuple[int, int, int], is_slow: bool
):
    """The layout nt has no measured slowdown."""
    slow = device(unaligned={"fp32": {"nn": 3.0, "tn": 3.0}})
    product = ProductOp(*sizes, layout)
    slowdown = product_seconds(product, slow) / product_seconds(product, device())
    assert slowdown == pytest.approx(3.0 if is_slow else 1.0)


def test_the_overhead_of_an_operation_is_counted_by_the_host_that_waits():
    waiting = device(asynchronous=False)
    product = ProductOp(100, 100, 100)
    arithmetic_s = product.flops / FLOPS_PER_S
    assert product_seconds(product, waiting) == pytest.approx(arithmetic_s - FLOOR_S)
    experts = ProductOp(100, 100, 100, batch=3, of_experts=True)
    assert product_seconds(experts, waiting) == pytest.approx(3 * arithmetic_s - FLOOR_S)
    assert move_seconds(MoveOp("plain", 10**6), waiting) == pytest.approx(10**6 / BANDWIDTH - FLOOR_S)
    assert move_seconds(MoveOp("plain", 10**6), device()) == pytest.approx(10**6 / BANDWIDTH)
    for smallest in (ProductOp(1, 1, 1), ProductOp(1, 1, 1, batch=2, of_experts=True)):
        assert product_seconds(smallest, waiting) == 0.0
    assert move_seconds(MoveOp("plain", 1), waiting) == 0.0


def test_the_slowdown_of_a_group_depends_on_the_rows_of_each_expert():
    slow = device(grouped=PiecewiseCurve((1.0, 100.0), (4.0, 1.0)))
    for rows, slowdown in ((1, 4.0), (10, 2.0), (100, 1.0), (1000, 1.0)):
        forward = ProductOp(rows, 20, 30, batch=4, of_experts=True)
        assert product_seconds(forward, slow) == pytest.approx(slowdown * forward.flops / FLOPS_PER_S)
        gradient = ProductOp(20, rows, 30, "tn", batch=4, of_experts=True)
        assert product_seconds(gradient, slow) == pytest.approx(slowdown * gradient.flops / FLOPS_PER_S)


def test_products_of_a_batch_that_are_no_experts_run_one_after_another():
    heads = ProductOp(10, 20, 30, batch=4)
    smallest_s = 2 / FLOPS_PER_S
    expected = 4 * (1e-3 + heads.flops / 4 / FLOPS_PER_S - smallest_s)
    assert product_seconds(heads, device(group_s=1e-3)) == pytest.approx(expected)


def test_attention_runs_head_by_head_at_the_rate_of_its_direction():
    rates = {"fp32 forward": 1e9, "fp32 backward": 1e8, "bf16 forward": 1e10}
    curves = {name: PiecewiseCurve((1.0, 1e12), (1 / rate, 1e12 / rate)) for name, rate in rates.items()}
    several = device(attention=curves)
    forward = AttentionOp(3, 128, 8, times=5)
    assert attention_seconds(forward, several) == pytest.approx(2 * 3 * 2 * 128 * 8 / 1e9)
    backward = AttentionOp(3, 128, 8, backward=True)
    assert attention_seconds(backward, several) == pytest.approx(5 * 3 * 2 * 128 * 8 / 1e8)
    bf16 = AttentionOp(3, 128, 8, precision="bf16")
    assert attention_seconds(bf16, several) == pytest.approx(2 * 3 * 2 * 128 * 8 / 1e10)
    unknown = AttentionOp(3, 128, 8, backward=True, precision="bf16")
    assert attention_seconds(unknown, several) == attention_seconds(backward, several)
