"""Sizes of a step over several workers: shares of the batch, reasons that count the workers, resuming."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.batch_plans import memory_of, shared, sizes
from harness.fakes.inventories import model
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelSharding
from orchestrator.types import Choice


@pytest.mark.parametrize(
    ("workers", "given_settings", "expected"),
    [
        (4, {}, (64, 1, 256)),
        (3, {}, (64, 1, 192)),
        (4, {"batch_size": 32}, (32, 1, 128)),
        (4, {"batch_size": 32, "accumulation_steps": 2}, (32, 2, 256)),
        (4, {"batch_size": 32, "global_batch_size": 256}, (32, 2, 256)),
        (4, {"batch_size": 32, "global_batch_size": 300}, (32, 3, 300)),
        (4, {"batch_size": 32, "global_batch_size": 64}, (16, 1, 64)),
        (4, {"accumulation_steps": 2, "global_batch_size": 256}, (32, 2, 256)),
        (4, {"accumulation_steps": 2, "global_batch_size": 250}, (32, 2, 250)),
        (3, {"global_batch_size": 100}, (34, 1, 100)),
        (4, {"global_batch_size": 4}, (1, 1, 4)),
        (4, {"accumulation_steps": 4}, (16, 4, 256)),
        (4, {"batch_size": 20_000}, (2_500, 1, 10_000)),
        (4, {"debug": True}, (4, 1, 16)),
        (4, {"auto": False}, (32, 1, 128)),
        (4, {"auto": False, "global_batch_size": 100}, (25, 1, 100)),
        (2, {"auto": False, "global_batch_size": 100}, (32, 2, 100)),
        (2, {"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32, "workers": 2}, (8, 2, 32)),
    ],
)
def test_sizes_over_workers(workers: int, given_settings: dict[str, Any], expected: tuple[int, int, int]):
    assert sizes(shared(workers, **given_settings)) == expected


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, (10, 1, 40)),
        ({"auto": False}, (10, 1, 40)),
        ({"accumulation_steps": 3}, (10, 3, 120)),
        ({"batch_size": 32}, (32, 1, 128)),
        ({"global_batch_size": 256}, (64, 1, 256)),
        ({"debug": True}, (4, 1, 16)),
    ],
)
def test_the_batch_of_a_loader_is_the_default_of_each_worker(
    given_settings: dict[str, Any], expected: tuple[int, int, int]
):
    chosen = shared(4, model(loader_batch=10), **given_settings)
    assert sizes(chosen) == expected
    assert ("batch_size of the DataLoader" in chosen.batch_size.reason) == (chosen.batch_size.value == 10)


def test_a_batch_larger_than_a_workers_share_is_cut_and_says_so():
    chosen = shared(4, batch_size=32, global_batch_size=64)
    assert chosen.batch_size.reason == "set by --batch-size 32, cut to 16: a worker's share of 64 samples"
    assert shared(4, batch_size=32).batch_size.reason == "set by --batch-size 32"
    beyond_the_data = "set by --batch-size 20000, cut to the 10000 samples of the data"
    assert shared(1, batch_size=20_000).batch_size.reason == beyond_the_data


@pytest.mark.parametrize(("workers", "times"), [(1, ""), (2, " × 2 workers"), (3, " × 3 workers")])
def test_reasons_of_the_global_batch_count_the_workers(workers: int, times: str):
    accumulated = shared(workers, batch_size=8, accumulation_steps=2)
    assert accumulated.global_batch.reason == f"it is batch 8 × accumulation 2{times}"
    measured = shared(workers, known={"batch_size": 8}, batch_size="auto")
    assert measured.global_batch.reason == f"it is one measured batch{times}"
    in_two = shared(workers, batch_size=8, global_batch_size=16 * workers).accumulation
    assert in_two.reason == f"{16 * workers} samples take 2 micro-batches of 8{times}"
    over = f", over {workers} workers" if workers > 1 else ""
    in_a_step = f"an optimizer step has this many samples{over}"
    assert shared(workers).global_batch.reason == in_a_step
    short = shared(workers, model(samples=50)).global_batch
    assert short == Choice(50, f"{in_a_step}, cut to the 50 samples of the data")


def test_a_resumed_run_keeps_its_global_batch():
    resumed = {"global_batch_size": 128}
    assert shared(2, known=resumed).global_batch == Choice(128, "the run was started with it")
    assert sizes(shared(2, known=resumed, batch_size=16)) == (16, 4, 128)
    assert sizes(shared(1, known=resumed, batch_size=16, accumulation_steps=2)) == (16, 8, 128)
    assert sizes(shared(3, known=resumed, debug=True)) == (4, 11, 128)
    assert sizes(shared(2, known=resumed, global_batch_size=64)) == (32, 1, 64)
    fitting = memory_of(20)
    assert shared(2, known=resumed, accumulation_steps=1, limit_bytes=fitting).batch_size.value <= 20


def test_a_measured_batch_is_per_worker():
    known = {"batch_size": 24}
    assert sizes(shared(4, known=known, batch_size="auto")) == (24, 1, 96)
    assert sizes(shared(4, known=known, batch_size="auto", accumulation_steps=2)) == (24, 2, 192)
    assert sizes(shared(4, known=known, batch_size="auto", global_batch_size=400)) == (24, 5, 400)
    assert sizes(shared(4, known=known | {"global_batch_size": 64}, batch_size="auto")) == (16, 1, 64)


def test_a_global_batch_smaller_than_the_workers_is_refused():
    with pytest.raises(
        UserError, match=r"^8 workers need a global batch of at least 8 samples; it has 6 \(set by"
    ) as caught:
        shared(8, global_batch_size=6)
    assert "raise --global-batch-size" in str(caught.value)
    with pytest.raises(UserError, match=r"it has 5 .*\. Lower --workers$"):
        shared(8, model(samples=5))


def test_each_worker_evaluates_its_share():
    assert shared(4, batch_size=32).evaluation.value == 64
    assert shared(4, model(validation_samples=10), batch_size=32).evaluation.value == 3


def test_sharding_allows_a_larger_batch():
    facts = model(parameters=10**9, trainable=10**9)
    limit_bytes = memory_of(20, facts)
    replicated = shared(4, facts, limit_bytes=limit_bytes)
    sharded = shared(4, facts, limit_bytes=limit_bytes, sharding=ModelSharding(4, "zero2"))
    assert replicated.batch_size.value <= 20
    assert sharded.batch_size.value == 64


def test_remote_experts_allow_a_larger_batch():
    facts = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8)
    limit_bytes = memory_of(20, facts)
    assert shared(4, facts, limit_bytes=limit_bytes).batch_size.value <= 20
    assert (
        shared(4, facts, limit_bytes=limit_bytes, sharding=ModelSharding(4, "experts")).batch_size.value == 64
    )


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, (64, 1, 64)),
        ({"batch_size": 32}, (32, 1, 32)),
        ({"batch_size": 32, "accumulation_steps": 2}, (32, 2, 64)),
        ({"batch_size": 32, "global_batch_size": 256}, (32, 8, 256)),
        ({"accumulation_steps": 2, "global_batch_size": 256}, (128, 2, 256)),
        ({"global_batch_size": 3}, (3, 1, 3)),
        ({"debug": True}, (4, 1, 4)),
    ],
)
def test_a_primary_gate_puts_the_whole_batch_on_one_host(
    given_settings: dict[str, Any], expected: tuple[int, int, int]
):
    chosen = shared(4, sharding=ModelSharding(4, "experts", primary=True), **given_settings)
    assert sizes(chosen) == expected
    assert "workers" not in chosen.global_batch.reason + chosen.accumulation.reason
    assert chosen.evaluation.value == min(1_000, 2 * expected[0]) or "debug" in given_settings
