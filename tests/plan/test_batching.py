"""Sizes of a step: starting values by memory, micro-batches that fit, and the sizes that flags
set."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import MEMORY_CLASSES, Batching, plan_batches
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.types import GIB, MIB, Choice, Rejected, bytes_text
from tests.support.inventories import configs, model, models

BATCH_NAMES = (
    "batch_size",
    "accumulation_steps",
    "global_batch_size",
    "eval_batch_size",
    "auto",
    "debug",
    "activation_checkpointing",
)


def batches(
    facts: ModelFacts | None = None,
    memory_total: float | None = None,
    limit_bytes: float = 64.0 * GIB,
    **given: Any,
) -> Batching:
    gpu_memory = None if memory_total is None else int(memory_total)
    return plan_batches(Config.of(**given), facts or model(), gpu_memory, limit_bytes, None)


def memory_of(samples: int, facts: ModelFacts | None = None) -> float:
    """Bytes that so many samples need."""
    return estimate_memory(facts or model(), samples, recompute=False, limit_bytes=None).total


def sizes(chosen: Batching) -> tuple[int, int, int]:
    """Micro-batch, accumulation steps and global batch."""
    return chosen.batch_size.value, chosen.accumulation.value, chosen.global_batch.value


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


# --- over several workers


def shared(
    workers: int, /, facts: ModelFacts | None = None, known: dict[str, int] | None = None, **given: Any
) -> Batching:
    """The sizes for so many workers with 64 GiB each; ``sharding`` and ``limit_bytes`` may be
    given too."""
    limit_bytes = given.pop("limit_bytes", 64.0 * GIB)
    sharding = given.pop("sharding", ModelSharding(workers))
    return plan_batches(Config.of(**given), facts or model(), 80 * 10**9, limit_bytes, known, sharding)


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
    assert shared(workers).global_batch.reason == f"an optimizer step has this many samples{over}"


def test_the_reason_of_a_batch_to_be_measured_says_how_much_fits():
    chosen = batches(batch_size="auto", limit_bytes=memory_of(300)).batch_size
    assert chosen.reason == "will be measured; the estimate says that up to 300 samples fit"
    assert chosen.value == 64


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


# --- properties for any settings


@settings(max_examples=200, deadline=None)
@given(
    config=st.one_of(configs(*BATCH_NAMES), configs(*reversed(BATCH_NAMES)), configs()),
    facts=models(),
    memory_total=st.one_of(st.none(), st.integers(2 * GIB, 200 * GIB)),
    limit_bytes=st.floats(0, 400.0 * GIB),
    workers=st.sampled_from([1, 1, 2, 3, 8]),
)
def test_batch_and_accumulation_cover_the_global_batch_exactly(
    config: Config, facts: ModelFacts, memory_total: int | None, limit_bytes: float, workers: int
):
    try:
        chosen = plan_batches(config, facts, memory_total, limit_bytes, None, ModelSharding(workers))
    except UserError:
        wanted = config.batch.global_batch_size
        assert facts.at_most(workers) < workers or (wanted is not None and wanted < workers)
        return
    batch, parts, whole = sizes(chosen)
    assert min(batch, parts, whole, chosen.evaluation.value) >= 1
    assert batch * parts * workers >= whole
    assert batch * (parts - 1) * workers < whole, "a micro-batch would be empty"
    assert workers <= whole == facts.at_most(whole)
    assert (batch - 1) * workers < whole
    if config.batch.global_batch_size and not config.run.debug:
        assert whole == facts.at_most(config.batch.global_batch_size)
    choices = [
        chosen.starting,
        chosen.batch_size,
        chosen.accumulation,
        chosen.global_batch,
        chosen.evaluation,
        chosen.recompute,
    ]
    assert all(choice.reason for choice in choices)


@settings(max_examples=200, deadline=None)
@given(
    facts=models(),
    memory_total=st.one_of(st.none(), st.integers(2 * GIB, 200 * GIB)),
    limit_bytes=st.floats(0, 400.0 * GIB),
    data=st.data(),
)
def test_a_freely_chosen_batch_fits_unless_nothing_does(
    facts: ModelFacts, memory_total: int | None, limit_bytes: float, data: st.DataObject
):
    config = data.draw(
        st.one_of(
            configs("global_batch_size"), configs("accumulation_steps"), configs("activation_checkpointing")
        )
    )
    chosen = plan_batches(config, facts, memory_total, limit_bytes, None)
    recompute = chosen.recompute.value
    fits = estimate_memory(facts, chosen.batch_size.value, recompute, limit_bytes).fits
    assert fits == estimate_memory(facts, 1, recompute, limit_bytes).fits
    if not fits:
        assert chosen.batch_size.value == 1
        assert "more than" in chosen.batch_size.reason


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
