"""How many samples meet in a step: starting values by memory, portions that fit, and the product that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import MEMORY_CLASSES, Batching, plan_batches
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory, largest_fitting
from orchestrator.types import GIB, MIB, Choice
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
    limit: float = 64.0 * GIB,
    **given: Any,
) -> Batching:
    return plan_batches(
        Config.of(**given), facts or model(), None if memory_total is None else int(memory_total), limit, None
    )


def sizes(found: Batching) -> tuple[int, int, int]:
    return found.batch_size.value, found.accumulation.value, found.global_batch.value


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
def test_the_starting_value_by_memory(gigabytes: float, start: str):
    found = batches(memory_total=gigabytes * 10**9).starting
    assert found.value == start
    assert found.reason


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
def test_the_effective_batch_of_a_class_is_kept_and_cut_anew(gigabytes: float, effective: int):
    """The table's portions are where the plan starts; the estimate then cuts the same samples into the largest that fit."""
    found = batches(memory_total=gigabytes * 10**9)
    assert sizes(found) == (effective, 1, effective)
    tight = batches(
        memory_total=gigabytes * 10**9, limit=estimate_memory(model(), 20, recompute=False, limit=None).total
    )
    assert tight.global_batch.value == effective
    assert 10 < tight.batch_size.value <= 20


# --- what was asked for


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
def test_sizes_that_were_asked_for(given_settings: dict[str, Any], expected: tuple[int, int, int]):
    assert sizes(batches(**given_settings)) == expected


def test_reasons_name_the_flag_that_asked():
    found = batches(batch_size=32, accumulation_steps=4)
    assert found.batch_size.reason == "asked for by --batch-size 32"
    assert found.accumulation.reason == "asked for by --accumulation-steps 4"
    assert batches(global_batch_size=128).global_batch.reason == "asked for by --global-batch-size 128"
    assert batches(eval_batch_size=5).evaluation == Choice(5, "asked for by --eval-batch-size")


def test_a_reason_never_claims_what_was_not_done():
    """Five micro-batches of eight samples are four of two; the plan says so and does not call them asked for."""
    found = batches(accumulation_steps=5, global_batch_size=8)
    assert sizes(found) == (2, 4, 8)
    assert "asked for" not in found.accumulation.reason
    assert "--accumulation-steps 5" in found.accumulation.reason
    short = batches(model(samples=50), batch_size=32, accumulation_steps=4)
    assert sizes(short) == (32, 2, 50)
    assert "50 samples there are" in short.global_batch.reason
    assert "asked for" not in batches(debug=True, accumulation_steps=4).accumulation.reason


# --- what fits


@pytest.mark.parametrize(
    ("whole", "fitting", "size"),
    [(64, 64, 64), (64, 40, 32), (64, 20, 16), (60, 20, 20), (97, 60, 49), (61, 20, 16), (101, 100, 51)],
)
def test_portions_are_equal_where_that_is_decent_and_nearly_equal_else(whole: int, fitting: int, size: int):
    found = batches(
        global_batch_size=whole, limit=estimate_memory(model(), fitting, recompute=False, limit=None).total
    )
    assert found.batch_size.value == size
    assert found.batch_size.value * found.accumulation.value >= whole
    if size < whole:
        assert "would need" in found.batch_size.rejected[0].why


def test_accumulation_alone_does_not_force_a_batch_that_cannot_fit():
    found = batches(
        accumulation_steps=1, limit=estimate_memory(model(), 10, recompute=False, limit=None).total
    )
    assert found.batch_size.value <= 10
    assert found.accumulation.value == 1


def test_recomputation_is_the_last_resort():
    facts = model(
        activation_bytes=4.0 * GIB,
        block_bytes=4.0 * GIB,
        blocks=16,
        block_input_bytes=1.0 * MIB,
        largest_bytes=0.0,
    )
    assert not batches(facts, limit=8.0 * GIB).recompute.value
    tight = batches(facts, limit=1.0 * GIB)
    assert tight.recompute.value
    assert "one sample needs" in tight.recompute.reason
    assert estimate_memory(facts, tight.batch_size.value, recompute=True, limit=1.0 * GIB).fits
    assert not batches(facts, limit=1.0 * GIB, activation_checkpointing="off").recompute.value
    assert not batches(facts, limit=1.0 * GIB, auto=False).recompute.value
    assert batches(facts, limit=64.0 * GIB, activation_checkpointing="on").recompute.value


def test_recomputation_is_not_turned_on_where_it_cannot_help():
    heavy: dict[str, Any] = {
        "activation_bytes": 4.0 * GIB,
        "block_bytes": 4.0 * GIB,
        "block_input_bytes": 1.0 * MIB,
    }
    no_blocks = batches(model(**heavy, blocks=0), limit=1.0 * GIB).recompute
    assert (no_blocks.value, "no blocks" in no_blocks.reason) == (False, True)
    one_block = batches(model(**heavy, blocks=1), limit=1.0 * GIB).recompute
    assert (one_block.value, "would not lessen it" in one_block.reason) == (False, True)


def test_where_nothing_fits_the_plan_says_so_and_takes_one():
    found = batches(model(blocks=0), limit=1.0)
    assert found.batch_size.value == 1
    assert "more than" in found.batch_size.reason


def test_a_measured_batch_takes_the_place_of_the_estimate():
    def found(**given_settings: Any) -> Batching:
        return plan_batches(
            Config.of(batch_size="auto", **given_settings), model(), None, 64.0 * GIB, {"batch_size": 24}
        )

    assert sizes(found()) == (24, 1, 24)
    assert sizes(found(accumulation_steps=3)) == (24, 3, 72)
    assert sizes(found(global_batch_size=100)) == (24, 5, 100)
    assert "measured" in found().batch_size.reason


def test_evaluation_takes_twice_as_much_and_never_more_than_there_is():
    assert batches(batch_size=32).evaluation.value == 64
    assert batches(model(validation_samples=10), batch_size=32).evaluation.value == 10
    assert batches(model(validation_samples=0), batch_size=32).evaluation.value == 1
    assert batches(batch_size=32, auto=False).evaluation.value == 32


def test_the_reason_of_the_evaluation_batch_is_that_of_its_size():
    assert "twice the training batch" in batches(batch_size=32).evaluation.reason
    few = batches(model(validation_samples=10), batch_size=32).evaluation
    assert few.reason.startswith("all validation samples at once: ")
    assert "twice the training batch" not in few.reason
    assert (
        "a worker's share of 10" in shared(4, model(validation_samples=10), batch_size=32).evaluation.reason
    )
    assert "no validation samples" in batches(model(validation_samples=0), batch_size=32).evaluation.reason


# --- over several workers


def shared(
    workers: int, /, facts: ModelFacts | None = None, known: dict[str, int] | None = None, **given: Any
) -> Batching:
    """As planned for so many workers with 64 GiB each; ``spread`` and ``limit`` may be given too."""
    limit, spread = given.pop("limit", 64.0 * GIB), given.pop("spread", ModelSharding(workers))
    return plan_batches(Config.of(**given), facts or model(), 80 * 10**9, limit, known, spread)


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


def test_a_batch_larger_than_a_workers_share_is_cut_and_says_so():
    found = shared(4, batch_size=32, global_batch_size=64)
    assert (
        found.batch_size.reason == "asked for by --batch-size 32, cut to 16: a worker's share of 64 samples"
    )
    assert "3 workers" in shared(3, accumulation_steps=2).global_batch.reason


def test_a_resumed_run_keeps_the_global_batch_it_began_with():
    begun = {"global_batch_size": 128}
    assert shared(2, known=begun).global_batch == Choice(128, "the run began with it")
    assert sizes(shared(2, known=begun, batch_size=16)) == (16, 4, 128)
    assert sizes(shared(1, known=begun, batch_size=16, accumulation_steps=2)) == (16, 8, 128)
    assert sizes(shared(3, known=begun, debug=True)) == (4, 11, 128)
    assert sizes(shared(2, known=begun, global_batch_size=64)) == (32, 1, 64)
    fitting = estimate_memory(model(), 20, recompute=False, limit=None).total
    assert shared(2, known=begun, accumulation_steps=1, limit=fitting).batch_size.value <= 20


def test_a_measured_batch_is_that_of_each_worker():
    known = {"batch_size": 24}
    assert sizes(shared(4, known=known, batch_size="auto")) == (24, 1, 96)
    assert sizes(shared(4, known=known, batch_size="auto", accumulation_steps=2)) == (24, 2, 192)
    assert sizes(shared(4, known=known, batch_size="auto", global_batch_size=400)) == (24, 5, 400)
    assert sizes(shared(4, known=known | {"global_batch_size": 64}, batch_size="auto")) == (16, 1, 64)


def test_a_global_batch_with_less_than_a_sample_for_each_worker_is_refused():
    with pytest.raises(
        UserError, match=r"^8 workers need a global batch of 8 samples at least; it has 6 \(asked for"
    ) as caught:
        shared(8, global_batch_size=6)
    assert "raise --global-batch-size" in str(caught.value)
    with pytest.raises(UserError, match=r"it has 5 .*\. Lower --workers$"):
        shared(8, model(samples=5))


def test_each_worker_evaluates_its_part():
    assert shared(4, batch_size=32).evaluation.value == 64
    assert shared(4, model(validation_samples=10), batch_size=32).evaluation.value == 3


def test_sharding_leaves_room_for_a_larger_batch():
    facts = model(parameters=10**9, trainable=10**9)
    limit = estimate_memory(facts, 20, recompute=False, limit=None).total
    whole, sharded = (
        shared(4, facts, limit=limit),
        shared(4, facts, limit=limit, spread=ModelSharding(4, "zero2")),
    )
    assert whole.batch_size.value <= 20
    assert sharded.batch_size.value == 64


def test_experts_that_live_elsewhere_leave_room_for_a_larger_batch():
    facts = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8)
    limit = estimate_memory(facts, 20, recompute=False, limit=None).total
    assert shared(4, facts, limit=limit).batch_size.value <= 20
    assert shared(4, facts, limit=limit, spread=ModelSharding(4, "experts")).batch_size.value == 64


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
def test_a_primary_gate_has_the_whole_batch_on_one_host(
    given_settings: dict[str, Any], expected: tuple[int, int, int]
):
    found = shared(4, spread=ModelSharding(4, "experts", primary=True), **given_settings)
    assert sizes(found) == expected
    assert "workers" not in found.global_batch.reason + found.accumulation.reason
    assert found.evaluation.value == min(1_000, 2 * expected[0]) or "debug" in given_settings


# --- whatever is asked


@settings(max_examples=200, deadline=None)
@given(
    config=st.one_of(configs(*BATCH_NAMES), configs(*reversed(BATCH_NAMES)), configs()),
    facts=models(),
    memory_total=st.one_of(st.none(), st.integers(2 * GIB, 200 * GIB)),
    limit=st.floats(0, 400.0 * GIB),
    workers=st.sampled_from([1, 1, 2, 3, 8]),
)
def test_batch_and_accumulation_cover_the_global_batch_exactly(
    config: Config, facts: ModelFacts, memory_total: int | None, limit: float, workers: int
):
    try:
        found = plan_batches(config, facts, memory_total, limit, None, ModelSharding(workers))
    except UserError:
        wanted = config.batch.global_batch_size
        assert facts.samples < workers or (wanted is not None and wanted < workers)
        return
    batch, parts, whole = sizes(found)
    assert min(batch, parts, whole, found.evaluation.value) >= 1
    assert batch * parts * workers >= whole
    assert batch * (parts - 1) * workers < whole, "a micro-batch would be empty"
    assert workers <= whole <= facts.samples
    assert (batch - 1) * workers < whole
    if config.batch.global_batch_size and not config.run.debug:
        assert whole == min(config.batch.global_batch_size, facts.samples)
    choices = [
        found.starting,
        found.batch_size,
        found.accumulation,
        found.global_batch,
        found.evaluation,
        found.recompute,
    ]
    assert all(choice.reason for choice in choices)


@settings(max_examples=200, deadline=None)
@given(
    facts=models(),
    memory_total=st.one_of(st.none(), st.integers(2 * GIB, 200 * GIB)),
    limit=st.floats(0, 400.0 * GIB),
    data=st.data(),
)
def test_what_the_plan_chooses_freely_fits_unless_nothing_does(
    facts: ModelFacts, memory_total: int | None, limit: float, data: st.DataObject
):
    config = data.draw(
        st.one_of(
            configs("global_batch_size"), configs("accumulation_steps"), configs("activation_checkpointing")
        )
    )
    found = plan_batches(config, facts, memory_total, limit, None)
    recompute = found.recompute.value
    fits = estimate_memory(facts, found.batch_size.value, recompute, limit).fits
    assert fits == (largest_fitting(facts, 1, recompute, limit) == 1)
    if not fits:
        assert found.batch_size.value == 1
        assert "more than" in found.batch_size.reason
