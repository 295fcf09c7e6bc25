"""The scaling table of a cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from harness.fakes.cost_machines import OPS, machine
from harness.fakes.inventories import model
from orchestrator.plan.cost.ops import MicroBatchOps, ProductOp
from orchestrator.plan.cost.scaling import (
    CHUNKS_FROM_TOKENS,
    IMBALANCE,
    ScalingJob,
    by_kind,
    counts_up_to,
    scaling_rows,
)


def test_a_table_of_four_thousand_devices_is_fast_and_loses_efficiency():
    experts = ProductOp(10, 20, 30, batch=64, of_experts=True)

    def trace(samples: int, hosts: int, chunks: int, alone: bool) -> MicroBatchOps:
        assert chunks in (1, 2)
        assert not (alone and hosts > 1)
        local_experts = replace(experts, batch=-(-64 // hosts))
        return replace(OPS, samples=samples, products=(*OPS.products, local_experts), parameters=10**6)

    start = time.process_time()
    rows = scaling_rows(ScalingJob(trace, 8, 512, 64, 128, False, model()), machine(512, 8, 1e-5, 1e9))
    assert time.process_time() - start < 5.0
    weak = [row for row in rows if row.kind == "weak" and row.strategy != "expert_parallel"]
    assert [row.devices for row in weak] == counts_up_to(4096)
    assert weak[0].efficiency == pytest.approx(1.0)
    assert all(later.efficiency <= earlier.efficiency for earlier, later in pairwise(weak))
    strong = [row for row in rows if row.kind == "strong" and row.strategy != "expert_parallel"]
    assert max(row.devices for row in strong) == 512  # each device needs a sample
    assert {row.micro_batch * row.micro_batches * row.devices for row in strong} == {512}
    expert_parallel = [row for row in rows if row.strategy == "expert_parallel"]
    assert max(row.devices for row in expert_parallel) == 64  # each device needs an expert


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(CHUNKS_FROM_TOKENS // 2, 2), (CHUNKS_FROM_TOKENS // 2 - 1, 1)]
)
def test_experts_are_divided_among_the_devices_of_expert_parallel_rows_alone(tokens: int, chunks: int):
    """Large micro-batches are exchanged in two chunks, from two samples of so many tokens on."""
    traced: list[tuple[int, int, int, bool]] = []

    def trace(samples: int, hosts: int, chunks: int, alone: bool) -> MicroBatchOps:
        traced.append((samples, hosts, chunks, alone))
        return replace(OPS, samples=samples)

    job = ScalingJob(
        trace, micro_batch=2, global_batch=8, experts=3, tokens_per_sample=tokens, tf32=False, facts=model()
    )
    rows = scaling_rows(job, machine(1, 4))
    assert [(row.kind, row.strategy, row.devices, row.micro_batch, row.micro_batches) for row in rows] == [
        ("weak", "single", 1, 2, 1),
        ("weak", "data_parallel", 2, 2, 1),
        ("weak", "data_parallel", 4, 2, 1),
        ("weak", "expert_parallel", 2, 2, 1),
        ("strong", "single", 1, 2, 4),
        ("strong", "data_parallel", 2, 2, 2),
        ("strong", "data_parallel", 4, 2, 1),
        ("strong", "expert_parallel", 2, 2, 2),
    ]
    of_one_kind = [(2, 1, 1, True)] * 2 + [(2, 1, 1, False)] * 2 + [(2, 2, chunks, False)]
    assert traced == of_one_kind * 2, "the first is the base of the speed-ups"


def test_experts_of_several_devices_are_loaded_unevenly():
    experts = ProductOp(10, 20, 30, batch=4, of_experts=True)
    job = ScalingJob(
        lambda samples, *_: replace(OPS, samples=samples, products=(experts,)), 2, 8, 4, 1, False, model()
    )
    imbalance = {
        (row.strategy, row.devices): row.predicted.parts["imbalance"] / row.predicted.parts["compute"]
        for row in scaling_rows(job, machine(1, 2))
        if row.kind == "weak"
    }
    uneven = pytest.approx(IMBALANCE - 1.0)
    assert imbalance == {("single", 1): 0.0, ("data_parallel", 2): 0.0, ("expert_parallel", 2): uneven}


def test_micro_batches_of_strong_scaling_hold_the_global_batch():
    """100 samples are two micro-batches of 50, not one of 64."""
    job = ScalingJob(lambda samples, *_: replace(OPS, samples=samples), 64, 100, 0, 1, False, model())
    rows = [row for row in scaling_rows(job, machine(1, 2)) if row.kind == "strong"]
    assert [(row.micro_batch, row.micro_batches) for row in rows] == [(50, 2), (50, 1)]


def test_each_table_begins_with_one_device():
    job = ScalingJob(lambda samples, *_: replace(OPS, samples=samples), 2, 8, 2, 1, False, model())
    tables = by_kind(scaling_rows(job, machine(1, 4)))
    assert {name: [row.devices for row in rows] for name, rows in tables.items()} == {
        ("weak", "data_parallel"): [1, 2, 4],
        ("weak", "expert_parallel"): [1, 2],
        ("strong", "data_parallel"): [1, 2, 4],
        ("strong", "expert_parallel"): [1, 2],
    }
    alone = by_kind(scaling_rows(job, machine()))
    assert {name: len(rows) for name, rows in alone.items()} == {
        ("weak", "single"): 1,
        ("strong", "single"): 1,
    }


def test_counts_are_powers_of_two_and_the_last():
    assert counts_up_to(24) == [1, 2, 4, 8, 16, 24]
    assert counts_up_to(1) == [1]
