"""Memory and arithmetic of a step from a handful of facts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    ShardingForm,
    estimate_memory,
    flops_per_step,
    largest_fitting,
)
from orchestrator.types import GIB, KIB, MIB
from tests.support.inventories import model, models

limits = st.one_of(st.none(), st.floats(0, 400.0 * GIB))


def test_weights_gradients_and_two_moments_are_fp32():
    facts = model(parameters=1_000_000, trainable=1_000_000, gate_parameters=0)
    found = estimate_memory(facts, 1, recompute=False, limit=None)
    assert (found.parameters, found.gradients, found.optimizer, found.gate) == (4e6, 4e6, 8e6, 0)


def test_gates_are_counted_apart_and_once():
    whole = estimate_memory(model(gate_parameters=0), 8, recompute=False, limit=None)
    split = estimate_memory(model(gate_parameters=1_000), 8, recompute=False, limit=None)
    assert split.gate == 1_000 * 16
    assert split.total == whole.total


def test_frozen_parameters_have_neither_gradients_nor_moments():
    found = estimate_memory(model(trainable=0), 1, recompute=False, limit=None)
    assert (found.parameters + found.gate, found.gradients, found.optimizer) == (4e6, 0, 0)


@settings(max_examples=200, deadline=None)
@given(facts=models(), batch=st.integers(1, 10**6), recompute=st.booleans(), limit=limits)
def test_every_part_is_real_and_the_total_is_their_sum(
    facts: ModelFacts, batch: int, recompute: bool, limit: float | None
):
    found = estimate_memory(facts, batch, recompute, limit)
    parts = [found.parameters, found.gradients, found.optimizer, found.activations, found.gate]
    assert min(parts) >= 0
    assert found.total == pytest.approx(sum(parts))
    assert found.parameters + found.gate >= 4 * facts.parameters - 1
    assert found.fits == (limit is None or found.total <= limit)
    assert json.loads(json.dumps(found.to_json()))["total"] == found.total


@settings(max_examples=200, deadline=None)
@given(facts=models(), batch=st.integers(1, 10**5), recompute=st.booleans())
def test_more_samples_need_as_much_more_each(facts: ModelFacts, batch: int, recompute: bool):
    one, some, more = (
        estimate_memory(facts, count, recompute, None).total for count in (1, batch, 2 * batch)
    )
    assert one <= some <= more
    assert (
        more - some == pytest.approx((some - one) / max(1, batch - 1) * batch, rel=1e-6, abs=1e3)
        or batch == 1
    )


def test_activations_grow_with_the_batch_and_nothing_else_does():
    a, b = (
        estimate_memory(model(), 1, recompute=False, limit=None),
        estimate_memory(model(), 9, recompute=False, limit=None),
    )
    assert replace(a, activations=0) == replace(b, activations=0)
    assert b.activations - a.activations >= 8 * MIB


def test_recomputation_keeps_less_where_there_are_several_blocks():
    facts = model(blocks=4, block_input_bytes=32.0 * KIB)
    assert (
        estimate_memory(facts, 64, recompute=True, limit=None).activations
        < 0.5 * estimate_memory(facts, 64, recompute=False, limit=None).activations
    )
    bare = model(blocks=0)
    assert estimate_memory(bare, 64, recompute=True, limit=None) == estimate_memory(
        bare, 64, recompute=False, limit=None
    )


# --- divided among workers


def of_a_million(
    form: ShardingForm, workers: int = 4, offload: bool = False, **changes: Any
) -> MemoryEstimate:
    facts = model(parameters=1_000_000, trainable=1_000_000, gate_parameters=0, **changes)
    return estimate_memory(
        facts, 1, recompute=False, limit=None, spread=ModelSharding(workers, form, offload)
    )


def test_whole_on_every_worker_costs_what_one_process_costs():
    assert of_a_million("none", workers=8) == of_a_million("none", workers=1)


def test_zero2_divides_gradients_and_moments():
    """Four blocks: a quarter of the gradients is whole at a time. Parameters are gathered beside a worker's own quarter."""
    found = of_a_million("zero2")
    assert (found.parameters, found.gradients, found.optimizer) == (5e6, 2e6, 2e6)


def test_zero3_divides_parameters_too():
    found = of_a_million("zero3")
    assert (found.parameters, found.gradients, found.optimizer) == (2e6, 2e6, 2e6)
    assert of_a_million("zero3", blocks=0).parameters == 5e6


def test_offloading_leaves_only_what_is_computed_with():
    two, three = of_a_million("zero2", offload=True), of_a_million("zero3", offload=True)
    assert (two.parameters, two.gradients, two.optimizer) == (4e6, 1e6, 0)
    assert (three.parameters, three.gradients, three.optimizer) == (1e6, 1e6, 0)
    assert of_a_million("none", offload=True) == of_a_million("none")


@settings(max_examples=200, deadline=None)
@given(facts=models(), workers=st.integers(2, 64))
def test_more_division_never_needs_more(facts: ModelFacts, workers: int):
    def total(form: ShardingForm, offload: bool = False) -> float:
        return estimate_memory(
            facts, 1, recompute=False, limit=None, spread=ModelSharding(workers, form, offload)
        ).total

    for finer, coarser in [
        (total("zero3"), total("zero2")),
        (total("zero2", offload=True), total("zero2")),
        (total("zero3", offload=True), total("zero2", offload=True)),
    ]:
        assert finer <= coarser * (1 + 1e-9)


def test_gates_are_divided_like_the_rest():
    forms: tuple[ShardingForm, ...] = ("none", "zero2", "zero3")
    for spread in (ModelSharding(4, form) for form in forms):
        split = estimate_memory(model(gate_parameters=1_000), 8, False, None, spread)
        assert split.total == pytest.approx(
            estimate_memory(model(gate_parameters=0), 8, False, None, spread).total
        )


# --- experts shared out


def of_experts(hosts: int, **changes: Any) -> MemoryEstimate:
    """A million parameters, 600,000 of them in 8 experts, on the host that has the most of these."""
    facts = model(**({"gate_parameters": 0, "largest_bytes": 0.0} | changes))
    return estimate_memory(facts, 1, recompute=False, limit=None, spread=ModelSharding(hosts, "experts"))


@pytest.mark.parametrize(
    ("hosts", "here"), [(1, 8), (2, 4), (3, 3), (4, 2), (5, 2), (7, 2), (8, 1), (100, 1)]
)
def test_a_host_has_its_experts_and_everything_else(hosts: int, here: int):
    found, parameters = of_experts(hosts), 400_000 + 600_000 * here / 8
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx(
        (4 * parameters, 4 * parameters, 8 * parameters)
    )


def test_one_host_costs_what_one_process_costs():
    assert of_experts(1, largest_bytes=1.0 * MIB) == estimate_memory(
        model(gate_parameters=0, largest_bytes=1.0 * MIB), 1, False, None
    )


def test_gates_are_whole_on_every_host():
    assert of_experts(4, gate_parameters=1_000).gate == 16_000


def test_a_dense_model_is_not_divided():
    assert of_experts(4, experts=0, expert_parameters=0).parameters == 4e6


def test_frozen_parameters_are_taken_to_be_experts():
    """The careful reading: what is trained is counted as whole on every host first."""
    found = of_experts(4, trainable=500_000)
    assert found.gradients == 4 * (400_000 + 100_000 / 4)
    assert of_experts(4, trainable=300_000).gradients == 4 * 300_000


def test_rows_on_their_way_need_room_between_hosts_only():
    travelling = (
        of_experts(2, largest_bytes=1.0 * MIB).activations
        - of_experts(1, largest_bytes=1.0 * MIB).activations
    )
    assert travelling == 2 * MIB


@settings(max_examples=200, deadline=None)
@given(facts=models(), hosts=st.integers(1, 64))
def test_the_state_never_grows_with_hosts_and_never_falls_below_the_dense_part(facts: ModelFacts, hosts: int):
    def state(count: int) -> float:
        found = estimate_memory(facts, 1, recompute=False, limit=None, spread=ModelSharding(count, "experts"))
        return found.total - found.activations

    whole = estimate_memory(facts, 1, recompute=False, limit=None)
    assert state(1) == pytest.approx(whole.total - whole.activations)
    assert state(hosts + 1) <= state(hosts) * (1 + 1e-9)
    dense = facts.parameters - min(facts.expert_parameters, facts.parameters - facts.gate_parameters)
    assert state(hosts) >= 4 * dense * (1 - 1e-9)


@pytest.mark.parametrize(
    ("spread", "holders"),
    [
        (ModelSharding(), 1),
        (ModelSharding(4), 4),
        (ModelSharding(4, "experts"), 4),
        (ModelSharding(4, "experts", primary=True), 1),
    ],
)
def test_who_holds_a_share_of_the_batch(spread: ModelSharding, holders: int):
    assert spread.data_ranks == holders


def test_without_a_limit_everything_fits():
    assert estimate_memory(
        model(parameters=10**12, trainable=10**12), 10**6, recompute=False, limit=None
    ).fits
    assert not MemoryEstimate(1, 0, 0, 0, 0, limit=0).fits


def test_backward_costs_two_forward_passes_and_recomputation_one():
    facts = model(flops_per_sample=10.0)
    assert flops_per_step(facts, 8, recompute=False) == 240
    assert flops_per_step(facts, 8, recompute=True) == 320


@settings(max_examples=300, deadline=None)
@given(
    facts=models(),
    most=st.integers(0, 5000),
    recompute=st.booleans(),
    limit=limits,
    spread=st.sampled_from(
        [
            ModelSharding(),
            ModelSharding(4, "zero2"),
            ModelSharding(3, "zero3", True),
            ModelSharding(3, "experts"),
        ]
    ),
)
def test_largest_fitting_is_the_last_that_fits(
    facts: ModelFacts, most: int, recompute: bool, limit: float | None, spread: ModelSharding
):
    found = largest_fitting(facts, most, recompute, limit, spread)
    assert 0 <= found <= most
    if found:
        assert estimate_memory(facts, found, recompute, limit, spread).fits
    if found < most:
        assert not estimate_memory(facts, found + 1, recompute, limit, spread).fits


@pytest.mark.parametrize("most", [0, 1, 2, 63, 64, 1000])
def test_largest_fitting_against_counting(most: int):
    facts = model()
    limit = estimate_memory(facts, 64, recompute=False, limit=None).total
    counted = max(
        (n for n in range(1, most + 1) if estimate_memory(facts, n, recompute=False, limit=limit).fits),
        default=0,
    )
    assert largest_fitting(facts, most, recompute=False, limit=limit) == counted == min(most, 64)
