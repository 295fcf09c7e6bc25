"""Seconds of all-reduces and of the token exchange, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experts.copy_costs import PIECE_ELEMENTS, ring_factor
from harness.fakes.cost_machines import OPS, device, machine
from orchestrator.plan.cost.machine import Interconnect, Link, Machine, Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MessageOp, MicroBatchOps
from orchestrator.plan.cost.traffic import (
    all_reduce_seconds,
    copies_seconds,
    exchange_seconds,
    traffic_seconds,
)
from orchestrator.plan.estimate import ShardingForm
from orchestrator.strategies import StrategyName


def test_an_all_reduce_runs_within_nodes_and_between_them():
    """In a node of 4: two latencies and 2 × 3/4 of the bytes; between 2 nodes one latency and 2 ×
    1/2."""
    seconds = all_reduce_seconds(1000.0, machine(2, 4, 1e-3, 1e6), 8)
    assert seconds == pytest.approx(2e-3 + 1.5e-3 + 1e-3 + 1e-3)


def test_an_exchange_within_and_between_nodes_runs_side_by_side():
    """1,000 bytes for three others, one of them in the node: two thirds leave the node."""
    near = Link("nvlink", 1e-3, 1e6)
    far = Link("network", 2e-3, 1e5)
    cluster = Machine(device(), 2, 2, Interconnect(near, near), Interconnect(far, far))
    message = MessageOp("rows", 1000)
    assert exchange_seconds(message, cluster, 4) == pytest.approx(2e-3 + 1000 * 2 / 3 / 1e5, rel=1e-3)
    assert exchange_seconds(message, cluster, 1) == 0.0


def test_without_traffic_scaling_is_ideal():
    one = predict(OPS, machine())
    many = predict(OPS, machine(8, 8), Parallelism(64, "data_parallel"))
    assert many.samples_per_second == pytest.approx(64 * one.samples_per_second)
    assert many.limited_by == one.limited_by


def test_a_slow_link_limits_the_step():
    predicted = predict(OPS, machine(1, 2, 0.0, 1e-9), Parallelism(2, "data_parallel"))
    assert predicted.step_seconds > 1e9
    assert predicted.limited_by == "gradient all-reduce"


def test_gradients_overlap_with_the_backward_pass_on_a_gpu_only():
    ops = replace(OPS, parameters=50 * 2**20)  # 200 MiB: nine buckets
    cluster = machine(1, 2, 1e-6, 1e10)
    parallelism = Parallelism(2, "data_parallel")
    on_gpu = predict(ops, cluster, parallelism)
    on_cpu = predict(ops, replace(cluster, device=device(asynchronous=False)), parallelism)
    expected = min(on_gpu.parts["gradients"] * 8 / 9, 2 / 3 * 32e-3)
    assert -on_gpu.parts["overlap"] == pytest.approx(expected, rel=0.02)
    assert on_cpu.parts["overlap"] == 0.0


MIB = 2**20
PAIR = machine(1, 2, 1e-3, 1e9)


def ring_of_two(size_bytes: float) -> float:
    """An all-reduce of two devices of ``PAIR``: one latency, and each byte once."""
    return 1e-3 + size_bytes / 1e9


def with_gradients(size_bytes: int, *messages: MessageOp) -> MicroBatchOps:
    """Gradients of so many bytes. The expert parameters have none that are reduced."""
    return MicroBatchOps(4, parameters=size_bytes // 4 + 77, expert_parameters=77, messages=messages)


@pytest.mark.parametrize(
    ("strategy", "size_bytes", "buckets"),
    [
        ("data_parallel", 0, 1),
        ("data_parallel", MIB, 1),
        ("data_parallel", MIB + 4, 2),
        ("data_parallel", 26 * MIB, 2),
        ("data_parallel", 26 * MIB + 4, 3),
        ("expert_parallel", 0, 1),
        ("expert_parallel", MIB + 4, 1),
        ("expert_parallel", 25 * MIB, 1),
        ("expert_parallel", 25 * MIB + 4, 2),
    ],
)
def test_gradients_are_reduced_in_buckets(strategy: StrategyName, size_bytes: int, buckets: int):
    """DDP has a first bucket of 1 MiB; all others are of 25 MiB. The sums of a step are 512 bytes more."""
    seconds = traffic_seconds(with_gradients(size_bytes), PAIR, Parallelism(2, strategy), 0.0)
    expected = buckets * ring_of_two(size_bytes / buckets) + ring_of_two(512)
    assert seconds["gradients"] == pytest.approx(expected, rel=1e-9)
    assert (seconds["exchange"], seconds["overlap"]) == (0.0, 0.0)


def test_one_device_sends_nothing():
    ops = with_gradients(100 * MIB, MessageOp("rows", 1000))
    seconds = traffic_seconds(ops, PAIR, Parallelism(1, "data_parallel"), 1.0)
    assert seconds == {"gradients": 0.0, "exchange": 0.0, "gathering": 0.0, "overlap": 0.0}


@pytest.mark.parametrize(("form", "gathers"), [("none", 0), ("zero2", 1), ("zero3", 2)])
def test_each_micro_batch_gathers_sharded_parameters(form: ShardingForm, gathers: int):
    """Once before the forward pass, and under zero3 again before the backward pass."""
    ops = with_gradients(100 * MIB)
    parallelism = Parallelism(2, "data_parallel", micro_batches=3, sharding=form)
    seconds = traffic_seconds(ops, PAIR, parallelism, 0.0)
    half = all_reduce_seconds(100 * MIB, PAIR, 2) / 2
    assert seconds["gathering"] == pytest.approx(3 * gathers * half)
    whole = traffic_seconds(ops, PAIR, Parallelism(2, "data_parallel"), 0.0)
    share = 3 * 0.5 if gathers else 1.0  # reduced and scattered by micro-batch, or all-reduced once
    assert seconds["gradients"] == pytest.approx(share * whole["gradients"], rel=1e-2)


def test_each_message_of_each_micro_batch_is_exchanged():
    ops = with_gradients(0, MessageOp("counts", 1000, times=2), MessageOp("rows", 3000, times=5))
    seconds = traffic_seconds(ops, PAIR, Parallelism(2, "expert_parallel", micro_batches=3), 0.0)
    assert seconds["exchange"] == pytest.approx(3 * (2 * 1.001e-3 + 5 * 1.003e-3), rel=1e-9)


@pytest.mark.parametrize("compute_s", [0.5, 0.001])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_all_buckets_but_the_last_overlap_with_the_last_backward_pass(compute_s: float, micro_batches: int):
    ops = with_gradients(51 * MIB)  # three buckets
    parallelism = Parallelism(2, "data_parallel", micro_batches)
    overlap = -traffic_seconds(ops, PAIR, parallelism, compute_s)["overlap"]
    backward_s = 2 / 3 * compute_s / micro_batches
    assert overlap == pytest.approx(min(2 * ring_of_two(17 * MIB), backward_s), rel=1e-9)


@pytest.mark.parametrize(("compute_s", "expected"), [(1.0, 0.75 * 0.2), (0.06, 0.06), (0.0, 0.0)])
def test_an_exchange_in_chunks_overlaps_with_the_experts(compute_s: float, expected: float):
    """Of four chunks three overlap, as far as there is computation left."""
    ops = with_gradients(0, MessageOp("rows", 199_000_000))
    overlap = {
        chunks: -traffic_seconds(ops, PAIR, Parallelism(2, "expert_parallel", chunks=chunks), compute_s)[
            "overlap"
        ]
        for chunks in (1, 4)
    }
    assert overlap == {1: 0.0, 4: pytest.approx(expected, rel=1e-9)}


def test_gradients_leave_less_computation_for_the_exchange_to_overlap_with():
    ops = with_gradients(50 * MIB, MessageOp("rows", 10**9))  # two buckets
    parallelism = Parallelism(2, "expert_parallel", chunks=2)
    bucket_s = ring_of_two(25 * MIB)
    overlap = -traffic_seconds(ops, PAIR, parallelism, 0.1)["overlap"]
    assert bucket_s < 2 / 3 * 0.1
    assert overlap == pytest.approx(0.1, rel=1e-9), "all computation hides communication"
    short = -traffic_seconds(ops, PAIR, parallelism, 10.0)["overlap"]
    assert short == pytest.approx(bucket_s + 1.001 / 2, rel=1e-9)


def test_a_ring_of_some_of_the_devices_has_the_latency_of_a_tree():
    """Three of four devices of a node: two latencies, 4/3 of the bytes, and nothing between nodes."""
    cluster = machine(3, 4, 1e-3, 1e6)
    assert all_reduce_seconds(3000.0, cluster, 3) == pytest.approx(2e-3 + 4e-3)
    assert all_reduce_seconds(3000.0, cluster, 4) == pytest.approx(2e-3 + 4.5e-3)
    assert all_reduce_seconds(3000.0, cluster, 5) == pytest.approx(2e-3 + 4.5e-3 + 1e-3 + 3e-3)
    assert all_reduce_seconds(3000.0, cluster, 1) == 0.0


def test_the_slower_of_near_and_far_messages_counts():
    near = Link("pcie", 5e-3, 1e5)
    far = Link("network", 1e-3, 1e6)
    cluster = Machine(device(), 2, 3, Interconnect(far, near), Interconnect(near, far))
    message = MessageOp("rows", 1000)
    peers_s = 0.5e-6
    assert exchange_seconds(message, cluster, 2) == pytest.approx(5e-3 + 1000 / 1e5, rel=1e-9)
    assert exchange_seconds(message, cluster, 3) == pytest.approx(5e-3 + 1000 / 1e5 + peers_s, rel=1e-9)
    expected = 5e-3 + 1000 * 2 / 5 / 1e5 + 4 * peers_s
    assert exchange_seconds(message, cluster, 6) == pytest.approx(expected, rel=1e-9)


def test_copies_sum_their_gradients_in_pieces_by_the_formula_of_the_balancer():
    """Three pieces in two exchanges each, between nodes; tokens stay in groups of two within a node."""
    near = Link("nvlink", 1e-3, 1e6)
    far = Link("network", 2e-3, 1e5)
    cluster = Machine(device(), 4, 2, Interconnect(near, near), Interconnect(far, far))
    parallelism = Parallelism(8, "expert_parallel", expert_replicas=4)
    size_bytes = 4.0 * PIECE_ELEMENTS * 2.5
    seconds = copies_seconds(size_bytes, cluster, parallelism)
    assert seconds == pytest.approx(6 * 2e-3 + ring_factor(4) * size_bytes / 1e5, rel=1e-3)
    assert copies_seconds(size_bytes, cluster, replace(parallelism, expert_replicas=1)) == 0.0
    ops = replace(OPS, messages=(MessageOp("rows", 1000),), expert_parameters=400)
    parts = traffic_seconds(ops, cluster, parallelism, 1.0)
    assert parts["exchange"] == pytest.approx(1e-3 + 1000 / 1e6)
    alone = traffic_seconds(ops, cluster, replace(parallelism, expert_replicas=1), 1.0)
    assert parts["gradients"] - alone["gradients"] == pytest.approx(
        copies_seconds(1600.0, cluster, parallelism)
    )
