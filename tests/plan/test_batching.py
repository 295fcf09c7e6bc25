"""Sizes of a step on one worker: starting values by memory, the sizes that flags set, and
micro-batches that fit."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.batch_plans import batches, memory_of, shared, sizes
from harness.fakes.inventories import model
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import MEMORY_CLASSES, Batching, plan_batches
from orchestrator.plan.estimate import estimate_memory
from orchestrator.types import GIB, MIB, Choice, Rejected, bytes_text

# --- the table of memory classes


@pytest.mark.parametrize(
    ("gigabytes", "start"),
    [
        (192, "16 × 4"), (80, "16 × 4"), (24, "16 × 4"), (20, "16 × 4"),
        (19.9, "12 × 5"), (16, "12 × 5"), (14, "12 × 5"),
        (13.9, "8 × 8"), (12, "8 × 8"), (10, "8 × 8"),
        (9.9, "4 × 16"), (8, "4 × 16"), (6, "4 × 16"),
        (5.9, "2 × 32"), (4, "2 × 32"), (2, "2 × 32"),
    ],
)  # fmt: skip
def test_the_memory_class_sets_the_starting_value(gigabytes: float, start: str):
    chosen = batches(memory_total=gigabytes * 10**9).starting
    assert chosen.value == start
    lowest = next(row[0] for row in MEMORY_CLASSES if gigabytes >= row[0])
    cards = f"GPUs of {lowest} GB and more" if lowest else "GPUs below 6 GB"
    assert chosen.reason == f"{cards} start from this batch × accumulation"


@pytest.mark.parametrize(
    ("name", "total_mib", "start"),
    [
        ("RTX A4500, 20 GB", 20_023, "16 × 4"),
        ("RTX 3080, 10 GB", 10_001, "8 × 8"),
        ("GTX 1060, 6 GB", 6_078, "4 × 16"),
        ("T4, 16 GB", 14_913, "12 × 5"),
    ],
)
def test_a_card_belongs_to_the_class_it_is_sold_as(name: str, total_mib: int, start: str):
    assert batches(memory_total=total_mib * MIB).starting.value == start


def test_the_table_is_that_of_the_specification():
    assert MEMORY_CLASSES == ((20, 16, 4), (14, 12, 5), (10, 8, 8), (6, 4, 16), (0, 2, 32))


def test_a_cpu_starts_with_one_micro_batch():
    assert sizes(batches()) == (64, 1, 64)


@pytest.mark.parametrize(("gigabytes", "effective"), [(80, 64), (16, 60), (12, 64), (8, 64), (4, 64)])
def test_the_samples_per_step_of_a_class_are_kept_and_cut_again(gigabytes: float, effective: int):
    """The plan starts from the table; the estimate cuts the same samples into the largest
    micro-batches that fit."""
    chosen = batches(memory_total=gigabytes * 10**9)
    assert sizes(chosen) == (effective, 1, effective)
    tight = batches(memory_total=gigabytes * 10**9, limit_bytes=memory_of(20))
    assert tight.global_batch.value == effective
    assert 10 < tight.batch_size.value <= 20


# --- sizes set by flags


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({"batch_size": 32}, (32, 1, 32)),
        ({"batch_size": 32, "accumulation_steps": 4}, (32, 4, 128)),
        ({"batch_size": 32, "global_batch_size": 128}, (32, 4, 128)),
        ({"batch_size": 48, "global_batch_size": 128}, (48, 3, 128)),
        ({"accumulation_steps": 4, "global_batch_size": 128}, (32, 4, 128)),
        ({"accumulation_steps": 3, "global_batch_size": 128}, (43, 3, 128)),
        ({"global_batch_size": 128}, (128, 1, 128)),
        ({"accumulation_steps": 4}, (16, 4, 64)),
        ({"batch_size": 8, "accumulation_steps": 2, "global_batch_size": 16, "workers": 1}, (8, 2, 16)),
        ({"batch_size": 20_000}, (10_000, 1, 10_000)),
        ({"global_batch_size": 20_000}, (10_000, 1, 10_000)),
        ({"debug": True}, (4, 1, 4)),
        ({"debug": True, "batch_size": 32, "accumulation_steps": 4}, (4, 1, 4)),
        ({"auto": False}, (32, 1, 32)),
        ({"auto": False, "accumulation_steps": 4}, (32, 4, 128)),
        ({"auto": False, "global_batch_size": 8}, (8, 1, 8)),
        ({"auto": False, "global_batch_size": 100}, (32, 4, 100)),
        ({"auto": False, "batch_size": 7}, (7, 1, 7)),
    ],
)
def test_flags_set_the_sizes(given_settings: dict[str, Any], expected: tuple[int, int, int]):
    assert sizes(batches(**given_settings)) == expected


def test_reasons_name_the_flag_that_set_the_value():
    chosen = batches(batch_size=32, accumulation_steps=4)
    assert chosen.batch_size.reason == "set by --batch-size 32"
    assert chosen.accumulation.reason == "set by --accumulation-steps 4"
    assert batches(global_batch_size=128).global_batch.reason == "set by --global-batch-size 128"
    assert batches(eval_batch_size=5).evaluation == Choice(5, "set by --eval-batch-size")


def test_a_reason_never_claims_a_size_that_was_not_used():
    """Five micro-batches of eight samples are four of two; the plan says so and names no flag as
    the reason."""
    chosen = batches(accumulation_steps=5, global_batch_size=8)
    assert sizes(chosen) == (2, 4, 8)
    assert "set by" not in chosen.accumulation.reason
    assert "--accumulation-steps 5" in chosen.accumulation.reason
    short = batches(model(samples=50), batch_size=32, accumulation_steps=4)
    assert sizes(short) == (32, 2, 50)
    assert "cut to the 50 samples of the data" in short.global_batch.reason
    assert "set by" not in batches(debug=True, accumulation_steps=4).accumulation.reason


# --- sizes that fit


@pytest.mark.parametrize(
    ("whole", "fitting", "size"),
    [(64, 64, 64), (64, 40, 32), (64, 20, 16), (60, 20, 20), (97, 60, 49), (61, 20, 16), (101, 100, 51)],
)
def test_micro_batches_are_equal_unless_that_wastes_half_of_the_memory(whole: int, fitting: int, size: int):
    chosen = batches(global_batch_size=whole, limit_bytes=memory_of(fitting))
    assert chosen.batch_size.value == size
    assert chosen.batch_size.value * chosen.accumulation.value >= whole
    if size < whole:
        twice = min(whole, 2 * size)
        needed = bytes_text(memory_of(twice))
        assert chosen.batch_size.rejected == (Rejected(str(twice), f"would need {needed}"),)
        count = chosen.accumulation.value
        assert chosen.accumulation.reason == f"{whole} samples take {count} micro-batches of {size}"
    else:
        assert chosen.accumulation.reason == "one micro-batch holds all samples"


def test_accumulation_alone_does_not_force_a_batch_that_cannot_fit():
    chosen = batches(accumulation_steps=1, limit_bytes=memory_of(10))
    assert chosen.batch_size.value <= 10
    assert chosen.accumulation.value == 1


def test_recomputation_is_the_last_resort():
    facts = model(
        activation_bytes=4.0 * GIB,
        block_bytes=4.0 * GIB,
        blocks=16,
        block_input_bytes=1.0 * MIB,
        largest_bytes=0.0,
    )
    assert not batches(facts, limit_bytes=8.0 * GIB).recompute.value
    tight = batches(facts, limit_bytes=1.0 * GIB)
    assert tight.recompute.value
    assert "one sample needs" in tight.recompute.reason
    assert estimate_memory(facts, tight.batch_size.value, recompute=True, limit_bytes=1.0 * GIB).fits
    assert not batches(facts, limit_bytes=1.0 * GIB, activation_checkpointing="off").recompute.value
    assert not batches(facts, limit_bytes=1.0 * GIB, auto=False).recompute.value
    assert batches(facts, limit_bytes=64.0 * GIB, activation_checkpointing="on").recompute.value


def test_recomputation_is_not_turned_on_where_it_cannot_help():
    heavy: dict[str, Any] = {
        "activation_bytes": 4.0 * GIB,
        "block_bytes": 4.0 * GIB,
        "block_input_bytes": 1.0 * MIB,
    }
    no_blocks = batches(model(**heavy, blocks=0), limit_bytes=1.0 * GIB).recompute
    assert (no_blocks.value, "no blocks" in no_blocks.reason) == (False, True)
    one_block = batches(model(**heavy, blocks=1), limit_bytes=1.0 * GIB).recompute
    assert (one_block.value, "would not reduce it" in one_block.reason) == (False, True)


def test_one_sample_is_planned_if_nothing_fits_and_the_reason_says_so():
    chosen = batches(model(blocks=0), limit_bytes=1.0)
    assert chosen.batch_size.value == 1
    assert "more than" in chosen.batch_size.reason


def test_a_measured_batch_replaces_the_estimate():
    def with_measured(**given: Any) -> Batching:
        config = Config.of(batch_size="auto", **given)
        return plan_batches(config, model(), None, 64.0 * GIB, {"batch_size": 24})

    assert sizes(with_measured()) == (24, 1, 24)
    assert sizes(with_measured(accumulation_steps=3)) == (24, 3, 72)
    assert sizes(with_measured(global_batch_size=100)) == (24, 5, 100)
    assert "measured" in with_measured().batch_size.reason


def test_evaluation_batches_are_twice_as_large_up_to_the_validation_set():
    assert batches(batch_size=32).evaluation.value == 64
    assert batches(model(validation_samples=10), batch_size=32).evaluation.value == 10
    assert batches(model(validation_samples=0), batch_size=32).evaluation.value == 1
    assert batches(batch_size=32, auto=False).evaluation.value == 32


def test_the_reason_of_the_evaluation_batch_explains_its_size():
    assert "twice the training batch" in batches(batch_size=32).evaluation.reason
    few = batches(model(validation_samples=10), batch_size=32).evaluation
    assert few.reason.startswith("one batch holds all validation samples: ")
    assert "twice the training batch" not in few.reason
    assert (
        "a worker's share of 10" in shared(4, model(validation_samples=10), batch_size=32).evaluation.reason
    )
    assert "no validation samples" in batches(model(validation_samples=0), batch_size=32).evaluation.reason


def test_the_reason_of_a_batch_to_be_measured_says_how_much_fits():
    chosen = batches(batch_size="auto", limit_bytes=memory_of(300)).batch_size
    assert chosen.reason == "will be measured; the estimate says that up to 300 samples fit"
    assert chosen.value == 64


@pytest.mark.parametrize(
    ("given", "single_pass"),
    [
        ({"global_batch_size": 8}, True),
        ({"accumulation_steps": 2}, False),
    ],
)
def test_the_reason_of_a_batch_has_the_memory_of_the_plan(given: dict[str, Any], single_pass: bool) -> None:
    """Gradients of copied weights are short in a step of one pass."""
    facts = model(copied_experts=500_000)
    chosen = batches(facts, **given)
    assert (chosen.accumulation.value == 1) == single_pass
    memory = estimate_memory(facts, chosen.batch_size.value, False, None, single_pass=single_pass)
    assert bytes_text(memory.total) in chosen.batch_size.reason


def test_one_pass_may_fit_where_fewer_samples_do_not() -> None:
    """The short gradients of one pass save more than the last samples need."""
    facts = model(copied_experts=600_000, activation_bytes=1000.0, largest_bytes=0.0)
    limit_bytes = estimate_memory(facts, 64, False, None, single_pass=True).total
    assert not estimate_memory(facts, 63, False, limit_bytes).fits
    assert sizes(batches(facts, limit_bytes=limit_bytes)) == (64, 1, 64)


def test_more_micro_batches_than_exact_sums_can_hold_are_refused():
    settings = {"reproducible": True, "batch_size": 1}
    allowed = plan_batches(
        Config.of(**settings, global_batch_size=4096), model(samples=10_000), None, 1e12, None
    )
    assert allowed.batch_size.value == 1
    with pytest.raises(UserError, match="4097 micro-batches"):
        plan_batches(Config.of(**settings, global_batch_size=4097), model(samples=10_000), None, 1e12, None)
