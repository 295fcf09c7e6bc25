"""The cost model in numbers that can be reckoned by hand: limits, directions, and scaling without
and with traffic."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.model import (
    PARTS,
    DeviceCosts,
    Interconnect,
    Link,
    Machine,
    Parallelism,
    exchange_seconds,
    predict,
    product_seconds,
    sum_seconds,
)
from orchestrator.plan.cost.ops import MOVES, AttentionOp, MessageOp, MicroBatchOps, MoveOp, ProductOp
from orchestrator.plan.cost.scaling import ScalingJob, counts_up_to, scaling_rows

RATE, BANDWIDTH, FLOOR = 1e9, 1e8, 1e-5
SIZES = (1.0, 1e6)


def device(**changes: Any) -> DeviceCosts:
    """A GFLOP/s, 100 MB/s, and nothing else costs anything: where the host waits, 10 µs of a move
    are overhead."""
    corners = [(m, k, n) for m in SIZES for k in SIZES for n in SIZES]
    figures: dict[str, Any] = {
        "name": "a device",
        "memory_bytes": 1e9,
        "asynchronous": True,
        "products": {
            "fp32": {
                "nn": PiecewiseGrid(SIZES, SIZES, SIZES, tuple(2 * m * k * n / RATE for m, k, n in corners))
            }
        },
        "moves": {kind: PiecewiseCurve((1e3, 1e9), (1e3 / BANDWIDTH, 1e9 / BANDWIDTH)) for kind in MOVES},
        "attention": {
            f"fp32 {way}": PiecewiseCurve((1.0, 1e12), (1.0 / RATE, 1e12 / RATE))
            for way in ("forward", "backward")
        },
        "optimizer": PiecewiseCurve((1.0, 1e12), (0.0, 0.0)),
        "grouped": PiecewiseCurve((1.0,), (1.0,)),
    }
    return DeviceCosts(**(figures | changes))


def machine(
    nodes: int = 1, per_node: int = 1, latency: float = 0.0, speed: float = math.inf, **changes: Any
) -> Machine:
    link = Link("nvlink", latency, speed)
    return Machine(device(**changes), nodes, per_node, Interconnect(link, link), Interconnect(link, link))


WORK = MicroBatchOps(
    samples=4,
    products=(ProductOp(100, 200, 50),),
    moves=(MoveOp("plain", 10**6, times=3),),
    parameters=1000,
    peak_bytes=8000.0,
)


def test_a_step_by_hand() -> None:
    """2 × 100 × 200 × 50 FLOP at a GFLOP/s are 2 ms; 3 MB at 100 MB/s are 30 ms."""
    found = predict(WORK, machine())
    assert found.parts["compute"] == pytest.approx(2e-3)
    assert found.parts["memory"] == pytest.approx(30e-3)
    assert found.step_seconds == pytest.approx(32e-3)
    assert found.samples_per_second == pytest.approx(4 / 32e-3)
    assert found.limited_by == "memory bandwidth"


def test_parts_add_up_to_the_step() -> None:
    work = replace(WORK, messages=(MessageOp("rows", 1000, 4),), operations=50)
    found = predict(
        work, machine(2, 4, 1e-3, 1e6, operation_s=1e-2), Parallelism(8, "expert_parallel", 2, 1.5)
    )
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)


def test_attention_and_accumulation_by_hand() -> None:
    """Two products of 2 heads × 16² × 8, half of them: 2 × 2 × 256 × 8 FLOP. Twice as many
    micro-batches take twice as long."""
    work = MicroBatchOps(samples=1, attentions=(AttentionOp(2, 16, 8),))
    assert work.flops == 2 * 2 * 256 * 8
    assert predict(work, machine()).step_seconds == pytest.approx(work.flops / RATE)
    assert predict(work, machine(), Parallelism(micro_batches=2)).step_seconds == pytest.approx(
        2 * work.flops / RATE
    )


def test_the_host_counts_where_it_is_slower_than_the_device() -> None:
    work = replace(WORK, operations=10)
    assert predict(work, machine(operation_s=1e-3)).step_seconds == pytest.approx(
        32e-3
    )  # 10 ms, behind the device's 32
    slow = predict(work, machine(operation_s=10e-3))
    assert slow.step_seconds == pytest.approx(100e-3)
    assert slow.limited_by == "host overhead"
    waiting = predict(work, machine(operation_s=10e-3, asynchronous=False))
    assert waiting.step_seconds == pytest.approx(132e-3 - 3 * FLOOR - FLOOR)


def test_what_is_launched_from_python_costs_the_host_more() -> None:
    work = replace(WORK, operations=10, launches=5, sorts=1, views=3, tensors=2)
    figures: dict[str, Any] = {
        "operation_s": 10e-3,
        "launch_s": 20e-3,
        "sort_s": 5e-3,
        "view_s": 1e-3,
        "tensor_s": 2e-3,
        "step_s": 4e-3,
    }
    found = predict(work, machine(**figures), Parallelism(micro_batches=2))
    assert found.host_seconds == pytest.approx(2 * (100e-3 + 100e-3 + 5e-3 + 3e-3) + 4e-3 + 4e-3)
    assert found.step_seconds == pytest.approx(found.host_seconds)


def test_what_the_host_waits_for_cannot_be_hidden_behind_what_comes_after() -> None:
    """Before the wait 10 operations and nothing to compute; after it 32 ms of the device and no
    operation. With the update's 5 ms of the host, which hide behind them."""
    work = replace(WORK, operations=10, tensors=5)
    shape = machine(operation_s=1e-3, tensor_s=1e-3)
    assert predict(work, shape).step_seconds == pytest.approx(32e-3)
    waiting = replace(work, before_wait=MicroBatchOps(samples=0, operations=10))
    assert predict(waiting, shape).step_seconds == pytest.approx(10e-3 + 32e-3)
    assert predict(waiting, shape, Parallelism(micro_batches=3)).step_seconds == pytest.approx(3 * 42e-3)
    late = replace(work, before_wait=MicroBatchOps(samples=0, products=work.products, moves=work.moves))
    assert predict(late, shape).step_seconds == pytest.approx(32e-3 + 10e-3 + 5e-3)
    assert predict(late, machine(operation_s=1e-3, asynchronous=False)) == predict(
        work, machine(operation_s=1e-3, asynchronous=False)
    )


def test_a_host_that_takes_longer_than_the_device_is_the_limit() -> None:
    """Also where it is not twice as long."""
    assert predict(replace(WORK, operations=34), machine(operation_s=1e-3)).limited_by == "host overhead"


def test_grouped_products_one_after_another_and_together() -> None:
    experts = ProductOp(10, 20, 30, "nn", batch=4, of_experts=True)
    assert product_seconds(experts, device()) == pytest.approx(experts.flops / RATE)
    assert product_seconds(experts, device(grouped=PiecewiseCurve((1.0,), (1.5,)))) == pytest.approx(
        1.5 * experts.flops / RATE, rel=0.01
    )
    apart = product_seconds(experts, device(grouped=None, group_s=1e-3))
    assert apart == pytest.approx(4e-3 + experts.flops / RATE, rel=0.01)


def test_the_gradient_of_experts_has_their_rows_inside() -> None:
    """``tn``: k counts the rows of each."""
    inside = ProductOp(20, 10, 30, "tn", batch=4, of_experts=True)
    assert product_seconds(inside, device()) == pytest.approx(inside.flops / RATE)


def test_odd_sizes_cost_what_was_measured_of_them() -> None:
    odd, even = ProductOp(64, 64, 65), ProductOp(64, 64, 64)
    slow = device(unaligned={"fp32": {"nn": 3.0}})
    assert product_seconds(odd, slow) == pytest.approx(3 * product_seconds(odd, device()))
    assert product_seconds(even, slow) == pytest.approx(product_seconds(even, device()))


def test_without_traffic_scaling_is_ideal() -> None:
    alone, many = predict(WORK, machine()), predict(WORK, machine(8, 8), Parallelism(64, "data_parallel"))
    assert many.samples_per_second == pytest.approx(64 * alone.samples_per_second)
    assert many.limited_by == alone.limited_by


def test_a_link_that_carries_nothing_stops_everything() -> None:
    found = predict(WORK, machine(1, 2, 0.0, 1e-9), Parallelism(2, "data_parallel"))
    assert found.step_seconds > 1e9
    assert found.limited_by == "gradient sums"


def test_a_sum_by_hand() -> None:
    """In a node of 4: two turns of latency, 2 × 3/4 of the bytes; between 2 nodes one turn, and 2
    × 1/2."""
    found = sum_seconds(1000.0, machine(2, 4, 1e-3, 1e6), 8)
    assert found == pytest.approx(2e-3 + 1.5e-3 + 1e-3 + 1e-3)


def test_an_exchange_by_hand() -> None:
    """1,000 bytes to three others, one of them in the node: two thirds leave it, side by side with
    the rest."""
    near, far = Link("nvlink", 1e-3, 1e6), Link("network", 2e-3, 1e5)
    shape = Machine(device(), 2, 2, Interconnect(near, near), Interconnect(far, far))
    assert exchange_seconds(MessageOp("rows", 1000), shape, 4) == pytest.approx(
        2e-3 + 1000 * 2 / 3 / 1e5, rel=1e-3
    )
    assert exchange_seconds(MessageOp("rows", 1000), shape, 1) == 0.0


def test_gradients_hide_behind_the_backward_pass_of_a_gpu_alone() -> None:
    work = replace(WORK, parameters=50 * 2**20)  # 200 MiB: nine buckets
    shape = machine(1, 2, 1e-6, 1e10)
    on_gpu, on_cpu = (
        predict(work, replace(shape, device=device(asynchronous=kind)), Parallelism(2, "data_parallel"))
        for kind in (True, False)
    )
    assert -on_gpu.parts["overlap"] == pytest.approx(
        min(on_gpu.parts["gradients"] * 8 / 9, 2 / 3 * 32e-3), rel=0.02
    )
    assert on_cpu.parts["overlap"] == 0.0


def test_imbalance_costs_experts_alone() -> None:
    work = replace(WORK, products=(ProductOp(100, 200, 50), ProductOp(10, 20, 30, batch=4, of_experts=True)))
    even, uneven = (
        predict(work, machine(1, 2), Parallelism(2, "expert_parallel", imbalance=ratio))
        for ratio in (1.0, 1.5)
    )
    assert uneven.step_seconds - even.step_seconds == pytest.approx(0.5 * work.products[1].flops / RATE)


def test_memory_by_hand() -> None:
    """Weights and two moments of 1,000 parameters, and 8,000 bytes alive beside them, 4,000 of
    which are gradients."""
    found = predict(WORK, machine()).memory
    assert (found.parameters, found.gradients, found.optimizer, found.activations) == (
        4000.0,
        4000.0,
        8000.0,
        4000.0,
    )
    assert found.fits
    assert not predict(WORK, machine(memory_bytes=1e4)).memory.fits


@given(st.integers(1, 512), st.floats(1e-6, 1e-3), st.floats(1e6, 1e12), st.integers(0, 10**9))
def test_more_never_takes_less(devices: int, latency: float, speed: float, parameters: int) -> None:
    """Less bandwidth, more latency and more arithmetic: none of them makes a step shorter; nor
    more parameters, where nothing is hidden behind them (on a GPU, one bucket more can hide
    more)."""
    work, shape, team = (
        replace(WORK, parameters=parameters),
        machine(64, 8, latency, speed),
        Parallelism(devices, "data_parallel"),
    )
    more = replace(work, products=(*work.products, ProductOp(8, 8, 8)))
    base = predict(work, shape, team).step_seconds
    for slower in (machine(64, 8, 2 * latency, speed), machine(64, 8, latency, speed / 2)):
        assert predict(work, slower, team).step_seconds >= base * (1 - 1e-9)
    assert predict(more, shape, team).step_seconds >= base * (1 - 1e-9)
    waiting = replace(shape, device=device(asynchronous=False))
    larger = replace(work, parameters=parameters + 10**6)
    assert predict(larger, waiting, team).step_seconds >= predict(work, waiting, team).step_seconds * (
        1 - 1e-9
    )


def test_curves_between_past_and_below() -> None:
    curve = PiecewiseCurve((10.0, 1000.0), (1.0, 100.0))
    assert [curve.at(size) for size in (1, 10, 100, 1000, 2000)] == pytest.approx(
        [1.0, 1.0, 10.0, 100.0, 200.0]
    )
    with pytest.raises(ValueError, match="must be above 0 and rise"):
        PiecewiseCurve((2.0, 1.0), (1.0, 1.0))


@given(st.floats(1, 1e7), st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_grid_of_a_power_law_is_exact(m: float, k: float, n: float) -> None:
    grid = device().products["fp32"]["nn"]
    assert grid.at(m, k, n) == pytest.approx(2 * m * k * n / RATE)


def test_four_thousand_devices_quickly() -> None:
    experts = ProductOp(10, 20, 30, batch=64, of_experts=True)

    def work(samples: int, hosts: int, chunks: int) -> MicroBatchOps:
        assert chunks in (1, 2)
        return replace(
            WORK,
            samples=samples,
            products=(*WORK.products, replace(experts, batch=-(-64 // hosts))),
            parameters=10**6,
        )

    begun = time.process_time()
    rows = scaling_rows(ScalingJob(work, 8, 512, 64, 128, False), machine(512, 8, 1e-5, 1e9))
    assert time.process_time() - begun < 5.0
    weak = [row for row in rows if row.kind == "weak" and row.strategy != "expert_parallel"]
    assert [row.devices for row in weak] == counts_up_to(4096)
    assert weak[0].efficiency == pytest.approx(1.0)
    assert all(later.efficiency <= earlier.efficiency for earlier, later in pairwise(weak))
    strong = [row for row in rows if row.kind == "strong" and row.strategy != "expert_parallel"]
    assert max(row.devices for row in strong) == 512  # a device needs a sample
    assert {row.micro_batch * row.micro_batches * row.devices for row in strong} == {512}
    assert max(row.devices for row in rows if row.strategy == "expert_parallel") == 64  # and an expert


def test_counts_end_with_the_last() -> None:
    assert counts_up_to(24) == [1, 2, 4, 8, 16, 24]
    assert counts_up_to(1) == [1]
