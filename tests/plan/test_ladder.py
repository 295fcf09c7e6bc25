"""The ladder: rungs that need less and less memory, their columns against a search over the planner, and the
nearest configuration that fits."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from harness.fakes.inventories import gpu, machine, model
from orchestrator.cli.plan import PlanOptions
from orchestrator.config.reading.flags import FlagGrammar
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.cost.cluster_spec import cluster_of, inventory_of, parse_cluster
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.ladder import (
    PlanRequest,
    Rung,
    Site,
    check_fits,
    facts_between,
    ladder,
    largest_micro_batch,
    line_of,
    longest_sequence,
    nearest,
    shortage,
)
from orchestrator.plan.planning import plan
from orchestrator.types import GIB, MIB

TAKEN = ("optimizer", "sequence_length", "lora", "frozen_weights")
DENSE: dict[str, Any] = {"experts": 0, "expert_parameters": 0, "gate_parameters": 0, "moe_layers": 0}


def billions(parameters: float, **changes: Any) -> ModelFacts:
    """Return a dense model in 24 blocks whose activations, 700 MiB a sample, are mostly inside them."""
    sizes = {"parameters": int(parameters * 1e9), "trainable": int(parameters * 1e9)}
    changed: dict[str, Any] = {
        "activation_bytes": 700.0 * MIB,
        "block_bytes": 650.0 * MIB,
        "block_input_bytes": 24.0 * MIB,
        "largest_bytes": 30.0 * MIB,
        "blocks": 24,
        "units_per_sample": 512,
        "settings": TAKEN,
    }
    return model(**DENSE | sizes | changed | changes)


def of_length(config: Config, facts: ModelFacts) -> ModelFacts:
    """Return the facts with activations that grow with the length, in part by its square."""
    length = config.model.sequence_length or 512
    growth = (length / 512 + (length / 512) ** 2) / 2
    grown = facts.passes.changed(lambda moment: moment._replace(per_sample=growth * moment.per_sample))
    facts = replace(facts, passes=grown)
    if config.device.weight_precision == "bf16":
        return replace(facts, weight_bytes=2.0)
    if config.model.lora is None:
        return facts
    weight_bytes = 2.0 if config.model.frozen_weights == "auto" else 0.6
    return replace(facts, trainable=facts.parameters // 100, weight_bytes=weight_bytes)


def h100s(number: int) -> Inventory:
    return machine(*(replace(card(index), name="NVIDIA H100") for index in range(number)), ram_free=512 * GIB)


def card(index: int, total: float = 80 * GIB) -> Gpu:
    return gpu(index, total)


def asked(facts: ModelFacts, inventory: Inventory, **settings: Any) -> PlanRequest:
    config = Config.of(**{"task": "lm"} | settings)
    planned = plan(config, inventory, facts)
    return PlanRequest(config, facts, Site(inventory), planned, lambda each: of_length(each, facts))


def by_name(rungs: list[Rung]) -> dict[str, Rung]:
    return {rung.name: rung for rung in rungs}


CASES = [
    pytest.param(billions(0.1), machine(ram_free=12 * GIB), {}, id="cpu"),
    pytest.param(billions(1), h100s(1), {"batch_size": 96}, id="large-batch"),
    pytest.param(billions(7), h100s(1), {}, id="one-gpu"),
    pytest.param(billions(9), h100s(3), {"no_auto": True}, id="three-gpus"),
    pytest.param(billions(40), h100s(3), {"activation_checkpointing": "off", "debug": True}, id="too-large"),
    pytest.param(billions(7), h100s(1), {"optimizer": "sgd", "accumulation_steps": 3}, id="sgd"),
]


def case(facts: ModelFacts, inventory: Inventory, given: dict[str, Any]) -> PlanRequest:
    given = {name: value for name, value in given.items() if name != "no_auto"} | (
        {"auto": False, "parallel_strategy": "data_parallel"} if "no_auto" in given else {}
    )
    return asked(facts, inventory, **given)


@pytest.mark.parametrize(("facts", "inventory", "given"), CASES)
def test_a_rung_that_later_ones_keep_needs_less_than_those_before_it(
    facts: ModelFacts, inventory: Inventory, given: dict[str, Any]
) -> None:
    rungs = ladder(case(facts, inventory, given))
    kept = [rung for rung in rungs[:-1] if not rung.note]
    peaks = [rung.plan.memory.total for rung in kept if rung.plan is not None]
    assert len(peaks) == len(kept) >= 2
    assert peaks[0] >= peaks[1]
    assert all(less < more for more, less in pairwise(peaks[1:]))
    assert all(rung.note for rung in rungs if rung.plan is None), "a row without figures says why"


@pytest.mark.parametrize(("facts", "inventory", "given"), CASES)
def test_the_columns_are_right_by_trial(
    facts: ModelFacts, inventory: Inventory, given: dict[str, Any]
) -> None:
    request = case(facts, inventory, given)
    for rung in ladder(request):
        if rung.plan is None or rung.site is not None:
            continue

        def fits(rung: Rung = rung, **changes: Any) -> bool:
            config = request.config.but(
                **{**rung.changes, "debug": False, "accumulation_steps": None, **changes}
            )
            return plan(config, inventory, request.facts_of(config)).memory.fits

        samples = request.plan.global_batch_size.value
        size = largest_micro_batch(request, rung)
        assert not size or fits(batch_size=size, global_batch_size=None)
        assert not fits(batch_size=size + 1, global_batch_size=None)
        length = longest_sequence(request, rung)
        assert length is not None
        assert not length or fits(batch_size=1, global_batch_size=samples, sequence_length=length)
        assert not fits(batch_size=1, global_batch_size=samples, sequence_length=length + 1)


@pytest.mark.parametrize(("facts", "inventory", "given"), CASES)
def test_the_flags_of_the_nearest_configuration_fit_when_they_are_planned_again(
    facts: ModelFacts, inventory: Inventory, given: dict[str, Any]
) -> None:
    request = case(facts, inventory, given)
    found = nearest(request, ladder(request))
    assert found is not None
    flags = shlex.split(line_of(request, found))
    assert bool(flags) != request.plan.memory.fits, "what fits needs no flags"
    grammar = FlagGrammar(PlanOptions, "orchestrator plan")
    values = grammar.values(grammar.parse(flags))
    cluster = values.pop("cluster", None)
    config = request.config.but(**values)
    where = None
    if cluster is not None:
        where = cluster_of(parse_cluster(cluster))
        inventory = inventory_of(parse_cluster(cluster))
    again = plan(config, inventory, request.facts_of(config), cluster=where)
    assert again.memory.fits
    if cluster is None and not given.get("debug"):
        assert again.global_batch_size.value >= request.plan.global_batch_size.value


def test_a_batch_that_is_too_large_is_cut_and_nothing_else_is_changed() -> None:
    request = asked(billions(1), h100s(1), batch_size=200)
    found = nearest(request, ladder(request))
    assert found is not None
    flags = line_of(request, found)
    match = re.fullmatch(r"--batch-size (\d+) --global-batch-size 200", flags)
    assert match is not None, flags
    text = shortage(request)
    assert text is not None
    assert text.startswith("a micro-batch of 200 samples needs")
    assert text.endswith(f"The nearest configuration that fits: {flags}")
    check_fits(request)  # the run halves it


def test_changes_that_are_not_needed_are_left_out() -> None:
    request = asked(billions(7), h100s(1))  # 105 GiB of state, of which 8-bit moments save 39
    found = by_name(ladder(request))
    assert not found["+ recomputed activations"].fits
    assert found["+ 8-bit optimizer state"].fits
    near = nearest(request, list(found.values()))
    assert near is not None
    assert near.changes["optimizer"] == "adamw8bit"
    assert "recomputed" not in line_of(request, near)
    assert found["LoRA of rank 16 instead"].fits
    assert found["LoRA of rank 16 instead"].only_if_asked


def test_frozen_weights_in_4_bits_are_a_rung_beside_adapters_alone() -> None:
    request = asked(billions(50), h100s(1), lora=8)  # 93 GiB of frozen weights in bf16
    assert not request.plan.memory.fits
    found = by_name(ladder(request))
    packed = found["+ frozen weights in 4 bits"]
    assert packed.fits
    assert not packed.only_if_asked
    assert packed.own_flags == "--frozen-weights nf4"
    assert line_of(request, packed).endswith("--frozen-weights nf4")
    names = by_name(ladder(asked(billions(50), h100s(1))))
    assert "+ frozen weights in 4 bits" not in names
    asked_for = names["LoRA of rank 16, frozen weights in 4 bits"]
    assert asked_for.only_if_asked
    assert asked_for.own_flags == "--lora 16 --frozen-weights nf4"


def test_frozen_weights_in_4_bits_take_the_place_of_shards() -> None:
    packed = by_name(ladder(asked(billions(150), h100s(2), lora=8)))["+ frozen weights in 4 bits"]
    assert packed.plan is not None
    assert packed.plan.sharding.value == "none"
    assert not {"sharding", "cpu_offload"} & packed.changes.keys()


def test_combinations_that_are_refused_say_why() -> None:
    found = by_name(ladder(asked(billions(14), h100s(2), reproducible=True)))
    assert "cpu_offload" in found["+ offload to host memory"].note
    assert found["+ offload to host memory"].plan is None
    found = by_name(ladder(asked(billions(0.01), machine())))
    assert "nothing to shard" in found["+ parameters sharded"].note
    assert "workers with GPUs" in found["+ offload to host memory"].note
    assert "data sheets" in found["more devices"].note
    found = by_name(ladder(asked(billions(0.01, settings=()), machine(), optimizer="muon")))
    assert "does not take --lora" in found["LoRA of rank 16 instead"].note


def test_more_devices_are_proposed_where_nothing_else_helps() -> None:
    request = asked(billions(60), h100s(2), optimizer="sgd")
    rungs = ladder(request)
    assert not [rung.name for rung in rungs[:-1] if rung.fits and not rung.only_if_asked]
    assert rungs[-1].fits
    with pytest.raises(ResourceError, match=r"nearest configuration that fits: --cluster \dx\dxH100$"):
        check_fits(request)
    with pytest.raises(ResourceError, match="No configuration fits"):
        check_fits(asked(billions(4000), machine(gpu()), optimizer="sgd"))


def test_a_run_on_a_cpu_is_refused_only_beyond_all_of_the_free_memory() -> None:
    facts = billions(1)  # 16.1 GiB with one sample
    for ram, fits in ((14, False), (17, True)):
        request = asked(facts, machine(ram_free=ram * GIB), optimizer="adamw")
        assert not request.plan.memory.fits
        if fits:
            check_fits(request)
        else:
            with pytest.raises(ResourceError, match="--optimizer adamw8bit"):
                check_fits(request)


def test_memory_that_may_be_estimated_too_high_is_no_reason_to_refuse() -> None:
    """A GiB of state, and 6 GiB of activations with one sample, which may be 4.8 in truth."""
    facts = billions(0.0625, activation_bytes=6.0 * GIB, largest_bytes=0.0, block_bytes=0.0, blocks=0)
    for ram, fits in ((6.0, True), (5.5, False)):
        request = asked(facts, machine(ram_free=ram * GIB))
        assert not request.plan.memory.fits
        if fits:
            check_fits(request)
        else:
            with pytest.raises(ResourceError, match="one sample needs"):
                check_fits(request)


def test_a_configuration_that_fits_has_no_shortage() -> None:
    request = asked(billions(0.1), h100s(1))
    assert shortage(request) is None
    check_fits(request)
    near = nearest(request, ladder(request))
    assert near is not None
    assert line_of(request, near) == ""


def test_facts_between_two_lengths_are_never_too_small() -> None:
    facts = billions(1)

    def at(length: int) -> ModelFacts:
        config = Config.of(task="lm", sequence_length=length)
        return replace(of_length(config, facts), units_per_sample=length, parameters=10**9 + 7 * length)

    for length in (512, 513, 700, 1023, 1024):
        found = facts_between(at(512), at(1024), length)
        assert (found.parameters, found.units_per_sample) == (10**9 + 7 * length, length)
        exact = at(length)
        needed, least = found.passes.saved[0].per_sample, exact.passes.saved[0].per_sample
        assert least <= needed <= 1.125 * least
        assert found.samples == facts.samples
    assert facts_between(at(512), at(1024), 512) == at(512)
