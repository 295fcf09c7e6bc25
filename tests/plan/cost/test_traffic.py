"""Seconds of all-reduces and of the token exchange, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.plan.cost.machine import Interconnect, Link, Machine, Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MessageOp
from orchestrator.plan.cost.traffic import all_reduce_seconds, exchange_seconds
from tests.support.cost_machines import OPS, device, machine


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
