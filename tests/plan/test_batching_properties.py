"""Properties of the sizes of a step for any settings, models and devices."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fakes.batch_plans import sizes
from harness.fakes.inventories import configs, models
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import plan_batches
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.types import GIB

BATCH_NAMES = (
    "batch_size",
    "accumulation_steps",
    "global_batch_size",
    "eval_batch_size",
    "auto",
    "debug",
    "activation_checkpointing",
)


@settings(max_examples=80, deadline=None)
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
    assert batch * (parts - 1) * workers < whole, "a round would be empty"
    assert whole == facts.at_most(whole)
    if config.run.reproducible:
        # Micro-batches do not depend on the workers, some of which may have none of a round.
        assert batch <= whole
    else:
        assert workers <= whole
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


@settings(max_examples=80, deadline=None)
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
