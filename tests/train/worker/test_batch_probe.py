"""The memory that a measured batch size leaves free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.fakes.inventories import gpu, machine, model, planned
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts, estimate_memory, largest_fitting
from orchestrator.plan.evolution import grown
from orchestrator.plan.planning import plan, planned_facts
from orchestrator.tasks.load import load_task
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.world import World
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker import batch_probe
from orchestrator.train.worker.batch_probe import JointProbe, _growth_bytes
from orchestrator.train.worker.batch_size import SAFE
from orchestrator.train.worker.placed_experts import PlacedExperts
from orchestrator.types import GIB


def test_memory_is_left_for_experts_that_may_be_born() -> None:
    facts = model()
    assert _growth_bytes(planned(machine(gpu()), facts), facts) == 0
    plan = planned(machine(gpu()), facts, evolution="bold", max_experts=12)
    now = estimate_memory(facts, 1, False, None).total
    then = estimate_memory(grown(facts, 12), 1, False, None).total
    assert _growth_bytes(plan, facts) == pytest.approx(then - now)
    assert then - now > 16 * 300_000


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "accumulation_steps": 4},
        {"recompute_experts": True},
        {"optimizer": "sgd", "momentum": 0.0},
        {"ema_decay": 0.99},
    ],
)
def test_only_experts_that_may_be_born_need_memory_later(settings: dict[str, Any]) -> None:
    """Copies of weights, recomputed experts and the state of the optimizer are there in measured steps."""
    facts = model(large_experts=500_000)
    config = Config.of(task="synthetic", evolution="bold", max_experts=8, min_experts=8, **settings)
    chosen = plan(config, machine(gpu()), facts)
    assert chosen.evolution_rules is not None
    assert chosen.evolution_rules.max_experts == facts.experts
    assert _growth_bytes(chosen, planned_facts(config, facts, chosen)) == pytest.approx(0)


def test_the_search_begins_with_the_estimate_of_the_planned_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average of the weights takes memory that the facts of the model alone do not have."""
    config = Config.of(task="synthetic", batch_size="auto", ema_decay=0.99, samples=16)
    facts = model(samples=2**20, parameters=10**9, trainable=10**9)
    chosen = plan(config, machine(gpu(total=40 * GIB)), facts)
    found: list[int] = []
    monkeypatch.setattr(
        batch_probe, "largest_batch", lambda _probe, _limit, estimate, _most: found.append(estimate)
    )
    batch_probe.find_batch(config, chosen, load_task(config), World.single_process("cuda:0"), facts)

    def largest(of: ModelFacts) -> int:
        return largest_fitting(lambda size: estimate_memory(of, size, False, chosen.memory.limit).fits, 2**17)

    assert found == [largest(planned_facts(config, facts, chosen))]
    assert found[0] < largest(facts)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 1),
        ({"accumulation_steps": 1}, 1),
        ({"accumulation_steps": 3}, 2),
        ({"global_batch_size": 8}, 1),
        ({"global_batch_size": 9}, 2),
    ],
)
def test_a_probe_has_several_passes_where_the_steps_of_the_run_have(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], passes: int
) -> None:
    """The gradients of one pass are alive in the next one: one pass alone would not show their memory."""
    config = Config.of(
        task="synthetic", batch_size="auto", samples=128, width=8, layers=1, experts=0, **settings
    )
    task = load_task(config)
    chosen = plan(config, machine(), model())
    found: list[list[int]] = []

    def search(probe: Any, *_: Any) -> None:
        measured = probe(8)
        assert (measured.batch, measured.peak) == (8, 0.0)
        assert measured.samples_per_second > 0

    def run(stepper: Stepper, batch: StepBatch, step: int) -> None:
        del stepper, step
        found.append([micro_batch.num_samples for micro_batch in batch.micro_batches])
        assert batch.global_samples == sum(found[-1])

    monkeypatch.setattr(batch_probe, "fastest_batch", search)
    monkeypatch.setattr(Stepper, "run", run)
    batch_probe.find_batch(config, chosen, task, World.single_process("cpu"), model())
    assert found[0] == [8] * passes


@pytest.mark.parametrize("halvings", [0, 2])
def test_gpus_that_divide_a_model_begin_below_the_estimate_of_their_part(
    monkeypatch: pytest.MonkeyPatch, halvings: int
) -> None:
    """After a start that ran out of memory they begin with half as much, and stay below what failed."""
    settings: dict[str, Any] = {"parallel_strategy": "expert_parallel", "workers": 3, "sharding": "zero3"}
    config = Config.of(task="synthetic", batch_size="auto", samples=16, **settings)
    facts = model(samples=2**20, parameters=10**9, trainable=10**9)
    chosen = plan(config, machine(*[gpu(total=40 * GIB)] * 3), facts)
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        batch_probe, "corrected_batch", lambda _probe, _estimate, _limit, *sizes: found.append(sizes)
    )
    joint = JointProbe(PlacedExperts(), Heartbeat(), halvings)
    world = World(0, 3, torch.device("cuda:0"))
    batch_probe.find_batch(config, chosen, load_task(config), world, facts, joint)
    limit = chosen.memory.limit
    assert limit is not None
    of_run = planned_facts(config, facts, chosen)

    def fits(size: int) -> bool:
        return estimate_memory(of_run, size, False, None, chosen.model_sharding, True).total <= SAFE * limit

    most = 2**20 // 8 // 3
    start = largest_fitting(fits, most)
    assert (
        8
        < start
        < largest_fitting(
            lambda size: estimate_memory(of_run, size, False, limit, chosen.model_sharding, True).fits, most
        )
    )
    assert found == [(start >> halvings, most if not halvings else (start >> halvings - 1) - 1)]
