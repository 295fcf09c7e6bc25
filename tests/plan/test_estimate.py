"""Memory and arithmetic of a step, estimated from facts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fakes.inventories import model, models
from orchestrator.config.settings import Config
from orchestrator.plan.compute import with_memory_settings
from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    ShardingForm,
    estimate_memory,
    flops_per_step,
    largest_fitting,
)
from orchestrator.plan.pass_memory import Moment, PassMemory, highest
from orchestrator.types import GIB, KIB, MIB

limits = st.one_of(st.none(), st.floats(0, 400.0 * GIB))


def estimate(
    facts: ModelFacts, micro_batch: int = 1, recompute: bool = False, sharding: ModelSharding | None = None
) -> MemoryEstimate:
    """The estimate without a limit."""
    return estimate_memory(facts, micro_batch, recompute, None, sharding)


def test_weights_gradients_and_two_moments_are_fp32():
    needed = estimate(model(parameters=1_000_000, trainable=1_000_000, gate_parameters=0))
    assert (needed.parameters, needed.gradients, needed.optimizer, needed.gate) == (4e6, 4e6, 8e6, 0)


def test_gates_are_counted_once_and_separately():
    without_gates = estimate(model(gate_parameters=0), 8)
    with_gates = estimate(model(gate_parameters=1_000), 8)
    assert with_gates.gate == 1_000 * 16
    assert with_gates.total == without_gates.total


def test_frozen_parameters_have_neither_gradients_nor_moments():
    needed = estimate(model(trainable=0))
    assert (needed.parameters + needed.gate, needed.gradients, needed.optimizer) == (4e6, 0, 0)


@settings(max_examples=80, deadline=None)
@given(facts=models(), batch=st.integers(1, 10**6), recompute=st.booleans(), limit_bytes=limits)
def test_no_part_is_negative_and_the_total_is_their_sum(
    facts: ModelFacts, batch: int, recompute: bool, limit_bytes: float | None
):
    needed = estimate_memory(facts, batch, recompute, limit_bytes)
    parts = [needed.parameters, needed.gradients, needed.optimizer, needed.activations, needed.gate]
    assert min(parts) >= 0
    assert needed.total == pytest.approx(sum(parts))
    assert needed.parameters + needed.gate >= 4 * facts.parameters - 1
    assert needed.fits == (limit_bytes is None or needed.total <= limit_bytes)
    assert json.loads(json.dumps(needed.to_json()))["total"] == needed.total


@settings(max_examples=80, deadline=None)
@given(facts=models(), batch=st.integers(1, 10**5), recompute=st.booleans())
def test_the_total_is_linear_in_the_batch_size(facts: ModelFacts, batch: int, recompute: bool):
    one, some, twice = (estimate(facts, count, recompute).total for count in (1, batch, 2 * batch))
    assert one <= some <= twice
    if batch > 1:
        per_sample = (some - one) / (batch - 1)
        assert twice - some == pytest.approx(per_sample * batch, rel=1e-6, abs=1e3)


def test_only_activations_grow_with_the_batch():
    one = estimate(model(), 1)
    nine = estimate(model(), 9)
    assert replace(one, activations=0) == replace(nine, activations=0)
    assert nine.activations - one.activations >= 8 * MIB


def test_recomputation_saves_less_if_there_are_several_blocks():
    facts = model(blocks=4, block_input_bytes=32.0 * KIB)
    recomputed = estimate(facts, 64, recompute=True)
    assert recomputed.activations < 0.5 * estimate(facts, 64).activations
    no_blocks = model(blocks=0)
    assert estimate(no_blocks, 64, recompute=True) == estimate(no_blocks, 64)


def test_activations_by_hand():
    """Each sample needs 1,000 bytes and 1.5 times the largest tensor; recomputation keeps a quarter of
    the 800 bytes of four blocks, and their inputs."""
    facts = model(
        blocks=4,
        activation_bytes=1000.0,
        activation_base=100.0,
        block_bytes=800.0,
        block_input_bytes=16.0,
        largest_bytes=40.0,
    )
    assert estimate(facts, 3).activations == 100 + 3 * 1060
    assert estimate(facts, 3, recompute=True).activations == 25 + 3 * (1060 + 16 - 600)
    frozen = replace(facts, trainable=0)
    on_hosts = estimate(frozen, 3, sharding=ModelSharding(2, "experts"))
    assert on_hosts.activations == pytest.approx(100 + 3 * (1060 + 80))
    assert estimate(facts, 3, sharding=ModelSharding(2, "zero2")).activations == 100 + 3 * 1060


@pytest.mark.parametrize(("samples", "held"), [(1, 300), (2, 600), (3, 800), (50, 800)])
def test_logits_of_a_loss_in_chunks_grow_until_a_chunk_is_full(samples: int, held: int):
    """They are alive beside the saved tensors, before the backward pass needs its own memory."""
    end = Moment(gradients=1.0)
    saved = end._replace(per_sample=1000.0, logits=300.0)
    facts = model(passes=PassMemory((saved,), end=end, full_chunk=800.0))
    assert estimate(facts, samples).activations == 1000 * samples + held
    backward = end._replace(per_sample=2500.0)
    larger = model(passes=PassMemory((saved, backward), end=end, full_chunk=800.0))
    assert estimate(larger, samples).activations == 2500 * samples


def test_gradients_that_are_not_complete_at_the_peak_take_no_memory_there():
    """400,000 bytes of gradients are complete by then, of 4,000,000; a second pass begins with all."""
    half = Moment(per_sample=6e6, gradients=1.0)
    facts = model(passes=PassMemory((half,), end=Moment(gradients=10.0)), expert_parameters=0)
    alone = estimate_memory(facts, 1, False, None, single_pass=True)
    assert alone.activations + alone.gradients + 4 * 1000 == pytest.approx(6e6 + 4e5)
    assert estimate(facts, 1).activations == 6e6


def test_gradients_of_experts_are_complete_when_the_trace_says_so_on_one_device_too():
    """2,400,000 bytes of experts are complete at the peak, and none of the dense part."""
    half = Moment(per_sample=6e6, expert_gradients=1.0)
    facts = model(passes=PassMemory((half,), end=Moment(gradients=1.0, expert_gradients=1.0)))
    alone = estimate_memory(facts, 1, False, None, single_pass=True)
    assert alone.activations + alone.gradients + 4 * 1000 == pytest.approx(6e6 + 2.4e6)


def test_workers_that_sum_copies_of_all_gradients_hold_them_twice_after_the_passes():
    facts = model(passes=PassMemory())
    buckets = estimate(facts, sharding=ModelSharding(2))
    copies = estimate(facts, sharding=ModelSharding(2, gradient_copies=True))
    assert copies.activations == pytest.approx(4e6)
    assert buckets.activations <= copies.activations
    assert estimate(facts, sharding=ModelSharding(1, gradient_copies=True)).activations == 0


def test_a_host_keeps_copies_of_its_own_experts():
    facts = model(copied_experts=600_000)
    hosts = estimate(facts, sharding=ModelSharding(4, "experts"))
    assert hosts.weight_copies == 2 * 600_000 / 4


def test_an_update_needs_copies_of_its_largest_tensor_after_the_passes():
    facts = model(passes=PassMemory(), update_bytes=100.0, expert_update_bytes=600.0)
    assert estimate(facts).activations == 600
    hosts = estimate(replace(facts, trainable=0), sharding=ModelSharding(4, "experts"))
    assert hosts.activations == 150, "two of eight experts"


@given(
    moments=st.lists(st.builds(Moment, *[st.floats(0, 1e9)] * 7), min_size=1), samples=st.integers(0, 1000)
)
def test_the_highest_moments_have_the_peak_of_all(moments: list[Moment], samples: int):
    passes = PassMemory(full_chunk=1e8)
    kept = highest(moments)
    assert set(kept) <= set(moments)
    for of in (lambda m: passes.alive(m, samples, 0.5), lambda m: passes.alive(m, samples) + m.gradients):
        assert max(map(of, kept)) == max(map(of, moments))


def test_a_frozen_gate_has_neither_gradients_nor_moments():
    needed = estimate(model(parameters=5000, trainable=300, gate_parameters=1000))
    assert (needed.parameters, needed.gradients, needed.optimizer) == (16_000, 0, 0)
    assert needed.gate == 4 * (1000 + 3 * 300)


# --- sharded over workers


def of_a_million(
    form: ShardingForm, workers: int = 4, offload: bool = False, **changes: Any
) -> MemoryEstimate:
    facts = model(parameters=1_000_000, trainable=1_000_000, gate_parameters=0, **changes)
    return estimate(facts, sharding=ModelSharding(workers, form, offload))


def test_a_replica_costs_what_one_process_costs():
    replica, alone = of_a_million("none", workers=8), of_a_million("none", workers=1)
    assert replace(replica, activations=alone.activations) == alone
    assert replica.activations == max(alone.activations, 4e6), "gradients are summed in a copy of a bucket"


def test_zero2_shards_gradients_and_moments():
    """With four blocks a quarter of the gradients is whole at a time; parameters are gathered next
    to the shard."""
    needed = of_a_million("zero2")
    assert (needed.parameters, needed.gradients, needed.optimizer) == (5e6, 2e6, 2e6)


def test_zero3_shards_parameters_too():
    needed = of_a_million("zero3")
    assert (needed.parameters, needed.gradients, needed.optimizer) == (2e6, 2e6, 2e6)
    assert of_a_million("zero3", blocks=0).parameters == 5e6


def test_offloading_leaves_only_the_gathered_state_on_the_device():
    zero2 = of_a_million("zero2", offload=True)
    zero3 = of_a_million("zero3", offload=True)
    assert (zero2.parameters, zero2.gradients, zero2.optimizer) == (4e6, 1e6, 0)
    assert (zero3.parameters, zero3.gradients, zero3.optimizer) == (1e6, 1e6, 0)
    assert of_a_million("none", offload=True) == of_a_million("none")


@settings(max_examples=80, deadline=None)
@given(facts=models(), workers=st.integers(2, 64))
def test_finer_sharding_never_needs_more(facts: ModelFacts, workers: int):
    def total(form: ShardingForm, offload: bool = False) -> float:
        return estimate(facts, sharding=ModelSharding(workers, form, offload)).total

    for finer, coarser in [
        (total("zero3"), total("zero2")),
        (total("zero2", offload=True), total("zero2")),
        (total("zero3", offload=True), total("zero2", offload=True)),
    ]:
        assert finer <= coarser * (1 + 1e-9)


def test_gates_are_sharded_like_the_rest():
    forms: tuple[ShardingForm, ...] = ("none", "zero2", "zero3")
    for sharding in (ModelSharding(4, form) for form in forms):
        with_gates = estimate(model(gate_parameters=1_000), 8, sharding=sharding)
        without_gates = estimate(model(gate_parameters=0), 8, sharding=sharding)
        assert with_gates.total == pytest.approx(without_gates.total)


# --- experts divided among hosts


def of_experts(hosts: int, **changes: Any) -> MemoryEstimate:
    """A million parameters, 600,000 of them in 8 experts, on the host with the most experts."""
    facts = model(**({"gate_parameters": 0, "largest_bytes": 0.0} | changes))
    return estimate(facts, sharding=ModelSharding(hosts, "experts"))


@pytest.mark.parametrize(
    ("hosts", "local_experts"), [(1, 8), (2, 4), (3, 3), (4, 2), (5, 2), (7, 2), (8, 1), (100, 1)]
)
def test_a_host_holds_its_experts_and_the_dense_part(hosts: int, local_experts: int):
    needed = of_experts(hosts)
    parameters = 400_000 + 600_000 * local_experts / 8
    assert (needed.parameters, needed.gradients, needed.optimizer) == pytest.approx(
        (4 * parameters, 4 * parameters, 8 * parameters)
    )


def test_one_host_costs_what_one_process_costs():
    facts = model(gate_parameters=0, largest_bytes=1.0 * MIB)
    assert of_experts(1, largest_bytes=1.0 * MIB) == estimate(facts)


def test_gates_are_whole_on_every_host():
    assert of_experts(4, gate_parameters=1_000).gate == 16_000


def test_a_dense_model_is_not_divided():
    assert of_experts(4, experts=0, expert_parameters=0).parameters == 4e6


def test_the_adapters_of_experts_are_divided_among_the_hosts():
    """Of 600,000 parameters in experts 60,000 are trained, and 20,000 outside."""
    needed = of_experts(4, trainable=80_000, frozen_experts=540_000)
    assert needed.gradients == 4 * (20_000 + 60_000 / 4)
    assert needed.optimizer == 8 * (20_000 + 60_000 / 4)


def test_frozen_experts_have_no_gradients():
    assert of_experts(4, trainable=300_000, frozen_experts=600_000).gradients == 4 * 300_000


def test_the_token_exchange_needs_no_more_memory_with_more_hosts():
    two_hosts = of_experts(2, largest_bytes=1.0 * MIB, activation_base=0.0)
    many_hosts = of_experts(128, largest_bytes=1.0 * MIB, activation_base=0.0)
    assert many_hosts.activations == two_hosts.activations


def test_the_token_exchange_needs_memory_only_between_hosts():
    two_hosts = of_experts(2, largest_bytes=1.0 * MIB, activation_base=0.0)
    one_host = of_experts(1, largest_bytes=1.0 * MIB, activation_base=0.0)
    assert two_hosts.activations - one_host.activations == 2 * MIB


@settings(max_examples=80, deadline=None)
@given(facts=models(), hosts=st.integers(1, 64))
def test_the_state_shrinks_with_hosts_down_to_the_dense_part(facts: ModelFacts, hosts: int):
    def state(count: int) -> float:
        needed = estimate(facts, sharding=ModelSharding(count, "experts"))
        return needed.total - needed.activations

    replica = estimate(facts)
    assert state(1) == pytest.approx(replica.total - replica.activations)
    assert state(hosts + 1) <= state(hosts) * (1 + 1e-9)
    dense = facts.parameters - min(facts.expert_parameters, facts.parameters - facts.gate_parameters)
    assert state(hosts) >= 4 * dense * (1 - 1e-9)


@pytest.mark.parametrize(
    ("sharding", "data_ranks"),
    [
        (ModelSharding(), 1),
        (ModelSharding(4), 4),
        (ModelSharding(4, "experts"), 4),
        (ModelSharding(4, "experts", primary=True), 1),
    ],
)
def test_a_primary_gate_leaves_one_data_rank(sharding: ModelSharding, data_ranks: int):
    assert sharding.data_ranks == data_ranks


def test_without_a_limit_everything_fits():
    assert estimate(model(parameters=10**12, trainable=10**12), 10**6).fits
    assert not MemoryEstimate(1, 0, 0, 0, 0, limit=0).fits
    assert MemoryEstimate(1, 2, 3, 4, 5, limit=15).fits
    assert not MemoryEstimate(1, 2, 3, 4, 5, limit=14).fits


def test_backward_costs_two_forward_passes_and_recomputation_one():
    facts = model(flops_per_sample=10.0)
    assert flops_per_step(facts, 8, recompute=False) == 240
    assert flops_per_step(facts, 8, recompute=True) == 320


SHARDINGS = [
    ModelSharding(),
    ModelSharding(4, "zero2"),
    ModelSharding(3, "zero3", True),
    ModelSharding(3, "experts"),
]


@settings(max_examples=100, deadline=None)
@given(
    facts=models(),
    most=st.integers(0, 5000),
    recompute=st.booleans(),
    limit_bytes=limits,
    sharding=st.sampled_from(SHARDINGS),
)
def test_largest_fitting_fits_and_one_more_sample_does_not(
    facts: ModelFacts, most: int, recompute: bool, limit_bytes: float | None, sharding: ModelSharding
):
    largest = largest_fitting(
        lambda size: estimate_memory(facts, size, recompute, limit_bytes, sharding).fits, most
    )
    assert 0 <= largest <= most
    if largest:
        assert estimate_memory(facts, largest, recompute, limit_bytes, sharding).fits
    if largest < most:
        assert not estimate_memory(facts, largest + 1, recompute, limit_bytes, sharding).fits


@pytest.mark.parametrize("most", [0, 1, 2, 63, 64, 1000])
def test_largest_fitting_equals_a_linear_search(most: int):
    facts = model()
    limit_bytes = estimate(facts, 64).total
    fitting = [n for n in range(1, most + 1) if estimate_memory(facts, n, False, limit_bytes).fits]
    searched = max(fitting, default=0)
    found = largest_fitting(lambda size: estimate_memory(facts, size, False, limit_bytes).fits, most)
    assert found == searched == min(most, 64)


def test_exact_sums_take_eight_bytes_for_each_trained_parameter():
    facts = with_memory_settings(
        Config.of(reproducible=True), model(parameters=1_000_000, gate_parameters=1_000)
    )
    usual = estimate(model(parameters=1_000_000, gate_parameters=1_000))
    exact = estimate(facts)
    assert exact.gradients == 2 * usual.gradients
    assert exact.gate == usual.gate + 4 * 1_000
