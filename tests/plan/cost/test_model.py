"""The cost model in numbers that can be computed by hand: limits, directions, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.cost_machines import FLOOR_S, FLOPS_PER_S, OPS, device, machine
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.machine import NO_LINK, Interconnect, Machine, Parallelism
from orchestrator.plan.cost.model import PARTS, predict
from orchestrator.plan.cost.ops import AttentionOp, MessageOp, MicroBatchOps, MoveOp, ProductOp


def test_a_step_takes_its_arithmetic_and_its_memory_traffic():
    """2 × 100 × 200 × 50 FLOP at 1 GFLOP/s take 2 ms; 3 MB at 100 MB/s take 30 ms."""
    predicted = predict(OPS, machine())
    assert predicted.parts["compute"] == pytest.approx(2e-3)
    assert predicted.parts["memory"] == pytest.approx(30e-3)
    assert predicted.step_seconds == pytest.approx(32e-3)
    assert predicted.samples_per_second == pytest.approx(4 / 32e-3)
    assert predicted.limited_by == "memory bandwidth"


def test_the_parts_sum_to_the_step():
    ops = replace(OPS, messages=(MessageOp("rows", 1000, 4),), operations=50)
    cluster = machine(2, 4, 1e-3, 1e6, operation_s=1e-2)
    predicted = predict(ops, cluster, Parallelism(8, "expert_parallel", 2, 1.5))
    assert set(predicted.parts) == set(PARTS)
    assert sum(predicted.parts.values()) == pytest.approx(predicted.step_seconds)


def test_attention_takes_its_arithmetic_for_each_micro_batch():
    """Two products of 2 heads × 16² × 8, half of each: 2 × 2 × 256 × 8 FLOP."""
    ops = MicroBatchOps(samples=1, attentions=(AttentionOp(2, 16**2 / 2, 8),))
    assert ops.flops == 2 * 2 * 256 * 8
    one = predict(ops, machine())
    two = predict(ops, machine(), Parallelism(micro_batches=2))
    assert one.step_seconds == pytest.approx(ops.flops / FLOPS_PER_S)
    assert two.step_seconds == pytest.approx(2 * ops.flops / FLOPS_PER_S)


def test_the_host_counts_if_it_is_slower_than_the_device():
    ops = replace(OPS, operations=10)
    hidden = predict(ops, machine(operation_s=1e-3))  # 10 ms of the host behind 32 ms of the device
    assert hidden.step_seconds == pytest.approx(32e-3)
    slow = predict(ops, machine(operation_s=10e-3))
    assert slow.step_seconds == pytest.approx(100e-3)
    assert slow.limited_by == "host overhead"
    waiting = predict(ops, machine(operation_s=10e-3, asynchronous=False))
    assert waiting.step_seconds == pytest.approx(132e-3 - 3 * FLOOR_S - FLOOR_S)


def test_the_host_has_a_cost_for_each_kind_of_operation():
    ops = replace(OPS, operations=10, launches=5, sorts=1, views=3, tensors=2)
    costs: dict[str, Any] = {
        "operation_s": 10e-3,
        "launch_s": 20e-3,
        "sort_s": 5e-3,
        "view_s": 1e-3,
        "tensor_s": 2e-3,
        "step_s": 4e-3,
    }
    predicted = predict(ops, machine(**costs), Parallelism(micro_batches=2))
    assert predicted.host_seconds == pytest.approx(2 * (100e-3 + 100e-3 + 5e-3 + 3e-3) + 4e-3 + 4e-3)
    assert predicted.step_seconds == pytest.approx(predicted.host_seconds)


def test_overhead_before_a_wait_is_not_hidden_behind_later_work():
    """Before the wait 10 operations and nothing to compute; after it 32 ms of the device and no
    operation.

    The update's 5 ms of the host are hidden behind these 32 ms.
    """
    ops = replace(OPS, operations=10, tensors=5)
    one_device = machine(operation_s=1e-3, tensor_s=1e-3)
    assert predict(ops, one_device).step_seconds == pytest.approx(32e-3)
    early_wait = replace(ops, before_wait=MicroBatchOps(samples=0, operations=10))
    assert predict(early_wait, one_device).step_seconds == pytest.approx(10e-3 + 32e-3)
    three = predict(early_wait, one_device, Parallelism(micro_batches=3))
    assert three.step_seconds == pytest.approx(3 * 42e-3)
    late_wait = replace(ops, before_wait=MicroBatchOps(samples=0, products=ops.products, moves=ops.moves))
    assert predict(late_wait, one_device).step_seconds == pytest.approx(32e-3 + 10e-3 + 5e-3)
    synchronous = machine(operation_s=1e-3, asynchronous=False)
    assert predict(late_wait, synchronous) == predict(ops, synchronous)


def test_a_host_slightly_slower_than_the_device_is_the_limit():
    predicted = predict(replace(OPS, operations=34), machine(operation_s=1e-3))
    assert predicted.limited_by == "host overhead"


def test_a_host_hidden_behind_the_device_is_not_the_limit():
    """31 ms of the host behind 32 ms of the device, of which memory takes 30 ms."""
    predicted = predict(replace(OPS, operations=31), machine(operation_s=1e-3))
    assert predicted.limited_by == "memory bandwidth"


@pytest.mark.parametrize(
    ("before", "limit"), [(10, "memory bandwidth"), (29, "memory bandwidth"), (31, "host overhead")]
)
def test_a_host_is_the_limit_where_it_is_slower_alone(before: int, limit: str):
    """After the wait, 32 ms of the device (30 ms of memory) hide 30 ms of the host, which limit nothing."""
    ops = replace(OPS, operations=before + 30, before_wait=MicroBatchOps(samples=0, operations=before))
    predicted = predict(ops, machine(operation_s=1e-3))
    assert predicted.parts["overhead"] == pytest.approx(before * 1e-3)
    assert predicted.limited_by == limit


def test_a_device_limits_only_where_the_host_does_not_wait():
    """Before the wait the host is slower (35 ms, of the device 32), after it the device computes nothing."""
    busy = MicroBatchOps(samples=0, products=OPS.products, moves=OPS.moves, operations=35)
    predicted = predict(replace(OPS, operations=35, before_wait=busy), machine(operation_s=1e-3))
    assert predicted.parts["overhead"] == pytest.approx(3e-3)
    assert predicted.parts_text() == "host overhead 100%"
    assert predicted.limited_by == "host overhead"


@given(
    operations=st.integers(0, 80),
    before=st.integers(0, 80),
    gradients=st.integers(0, 10**7),
    message_bytes=st.integers(0, 10**5),
    chunks=st.integers(1, 2),
)
def test_the_limit_has_the_largest_of_the_shares_that_are_listed(
    operations: int, before: int, gradients: int, message_bytes: int, chunks: int
):
    ops = replace(
        OPS,
        operations=before + operations,
        before_wait=MicroBatchOps(samples=0, operations=before),
        parameters=gradients,
        messages=(MessageOp("rows", message_bytes),),
    )
    parallelism = Parallelism(8, "expert_parallel", 2, 1.2, chunks)
    predicted = predict(ops, machine(2, 4, 1e-4, 1e8, operation_s=1e-3), parallelism)
    assert sum(predicted.bounds.values()) == pytest.approx(predicted.step_seconds)
    assert min(predicted.bounds.values()) >= 0.0
    assert predicted.parts_text().startswith(f"{predicted.limited_by} ")


def test_traffic_that_is_hidden_is_not_the_limit():
    """Gradients take longer than the arithmetic; all but the last of their buckets is hidden behind it."""
    slow = replace(OPS, parameters=50 * 2**20, moves=(MoveOp("plain", 10**9),))
    predicted = predict(slow, machine(1, 2, 0.0, 2e7), Parallelism(2, "data_parallel"))
    assert predicted.parts["gradients"] > predicted.parts["memory"] > 0
    assert predicted.limited_by == "memory bandwidth"


def test_samples_are_those_of_all_devices_and_micro_batches():
    predicted = predict(OPS, machine(1, 4), Parallelism(4, "data_parallel", micro_batches=3))
    assert predicted.samples == 4 * 3 * 4


def test_the_update_takes_its_bytes_without_the_overhead_of_a_host_that_waits():
    """1,000 parameters are 4,000 bytes."""
    update = PiecewiseCurve((1e3, 1e6), (0.01, 10.0))
    assert predict(OPS, machine(optimizer=update)).parts["optimizer"] == pytest.approx(0.04)
    waiting = predict(OPS, machine(optimizer=update, asynchronous=False))
    assert waiting.parts["optimizer"] == pytest.approx(0.03)


def test_the_host_is_hidden_behind_the_busiest_experts_too():
    """2 ms of experts, six times as many rows on the busiest device: 42 ms hide 40 ms of the host."""
    ops = replace(OPS, products=(ProductOp(100, 200, 50, of_experts=True),), operations=40)
    parallelism = Parallelism(2, "expert_parallel", imbalance=6.0)
    predicted = predict(ops, machine(1, 2, operation_s=1e-3), parallelism)
    assert predicted.parts["imbalance"] == pytest.approx(10e-3)
    assert predicted.step_seconds == pytest.approx(42e-3)


def test_operations_before_a_wait_do_not_delay_what_follows():
    """4 of 10 operations run before the wait, hidden behind 32 ms; the update's 5 ms come last."""
    before = MicroBatchOps(samples=0, products=OPS.products, moves=OPS.moves, operations=4)
    ops = replace(OPS, operations=10, tensors=5, before_wait=before)
    predicted = predict(ops, machine(operation_s=1e-3, tensor_s=1e-3))
    assert predicted.step_seconds == pytest.approx(32e-3 + 6e-3 + 5e-3)


def test_a_device_has_no_costs_but_those_it_is_given():
    costs = device()
    overheads = (costs.group_s, costs.operation_s, costs.launch_s, costs.sort_s, costs.view_s)
    assert {*overheads, costs.tensor_s, costs.step_s} == {0.0}
    assert (costs.sustained, costs.floor) == (1.0, 0.0)
    alone = Machine(costs)
    assert (alone.devices, alone.nodes, alone.per_node) == (1, 1, 1)
    assert alone.inner == alone.outer == Interconnect(NO_LINK, NO_LINK)
    assert (NO_LINK.latency_s, NO_LINK.bytes_per_s) == (0.0, math.inf)
    assert machine(3, 4).devices == 12
    assert Parallelism() == Parallelism(1, "single", 1, 1.0, 1, False, 1.0)


def test_imbalance_slows_only_the_experts():
    experts = ProductOp(10, 20, 30, batch=4, of_experts=True)
    ops = replace(OPS, products=(ProductOp(100, 200, 50), experts))
    two = machine(1, 2)
    even = predict(ops, two, Parallelism(2, "expert_parallel", imbalance=1.0))
    uneven = predict(ops, two, Parallelism(2, "expert_parallel", imbalance=1.5))
    assert uneven.step_seconds - even.step_seconds == pytest.approx(0.5 * experts.flops / FLOPS_PER_S)


def test_frozen_weights_take_the_bytes_that_they_are_stored_in():
    """900 of 1,000 parameters are frozen in two bytes; 600 of these are in experts of this device."""
    ops = replace(OPS, frozen=900, frozen_bytes=1800, expert_parameters=650)
    ops = replace(ops, frozen_experts=600, frozen_expert_bytes=1200)
    assert ops.replicated_bytes == 4 * 50 + 2 * 300


def test_short_weights_are_gathered_in_four_bytes():
    ops = replace(OPS, frozen=400, frozen_bytes=800, expert_parameters=100)
    assert ops.replicated_bytes == 4 * 500 + 800


@given(st.integers(1, 512), st.floats(1e-6, 1e-3), st.floats(1e6, 1e12), st.integers(0, 10**9))
def test_slower_links_and_more_work_never_shorten_a_step(
    devices: int, latency_s: float, bytes_per_s: float, parameters: int
):
    """More parameters do not either, if nothing overlaps (on a GPU, one bucket more can overlap
    more)."""
    ops = replace(OPS, parameters=parameters)
    cluster = machine(64, 8, latency_s, bytes_per_s)
    parallelism = Parallelism(devices, "data_parallel")

    def assert_not_shorter(more: float, base: float) -> None:
        assert more >= base * (1 - 1e-9)

    base = predict(ops, cluster, parallelism).step_seconds
    for slower in (machine(64, 8, 2 * latency_s, bytes_per_s), machine(64, 8, latency_s, bytes_per_s / 2)):
        assert_not_shorter(predict(ops, slower, parallelism).step_seconds, base)
    more_work = replace(ops, products=(*ops.products, ProductOp(8, 8, 8)))
    assert_not_shorter(predict(more_work, cluster, parallelism).step_seconds, base)
    synchronous = replace(cluster, device=device(asynchronous=False))
    more_parameters = replace(ops, parameters=parameters + 10**6)
    assert_not_shorter(
        predict(more_parameters, synchronous, parallelism).step_seconds,
        predict(ops, synchronous, parallelism).step_seconds,
    )
