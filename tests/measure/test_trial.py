"""A trial's measurement: the rate and its interval, and what the steps of several workers agree on."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from scipy.stats import t as student

from orchestrator.config.settings import Config
from orchestrator.errors import TrainingFailed
from orchestrator.measure.model_facts import model_facts
from orchestrator.measure.trial import TimedBlock, TrialLimits, TrialResult, _student, open_trial, rate_of
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.trainer import Trainer
from tests.support.ranks import run_ranks

TINY: dict[str, Any] = {"width": 8, "expert_hidden_size": (8,), "experts": 2, "layers": 1, "batch_size": 16}


def measured(
    limits: TrialLimits,
    world: World | None = None,
    task: Digits | None = None,
    parts: int = 1,
    **settings: Any,
) -> list[TrialResult]:
    config = Config.of(**TINY, **settings)
    prepared = Trainer(config=config).prepare()
    made, facts = task or Digits(config), model_facts(Digits(config), "cpu", "fp32")
    with open_trial(config, prepared.plan, facts, made, world or World.single_process(), limits) as measuring:
        found = [measuring.advance(1 / parts)]
        while not found[-1].done:
            found.append(measuring.advance(1 / parts))
    return found


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 9, 40])
def test_the_quantile(degrees: int) -> None:
    assert _student(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=2e-3)


def test_the_interval_holds_what_it_promises() -> None:
    """The true rate lies in the interval about 95 times of 100, short last batches and all."""
    chance, inside = random.Random(0), 0
    for _ in range(400):
        samples = [64 if chance.random() < 0.8 else 20 for _ in range(12)]
        blocks = [TimedBlock(n / 100 * chance.gauss(1, 0.1), 1, n) for n in samples]
        rate, interval = rate_of(blocks)
        inside += abs(rate - 100) <= interval * rate
    assert 0.90 < inside / 400 < 0.99
    assert rate_of([TimedBlock(2.0, 4, 100)]) == (50.0, float("inf"))
    assert rate_of([TimedBlock(1.0, 1, 10)] * 5) == (10.0, 0.0)


def test_a_measurement_ends_when_it_knows_enough_or_has_no_more_time() -> None:
    (found,) = measured(TrialLimits(0.3))
    assert found.done
    assert found.samples_per_second == pytest.approx(
        16 / found.step_seconds, rel=1e-6
    )  # short last batches are left out
    assert set(found.phases) == {"data", "forward", "backward", "optimizer"}
    assert sum(found.phases.values()) == pytest.approx(found.step_seconds, rel=0.5)
    assert found.validation_loss is None
    assert found.peak_memory_bytes > 2**20


def test_in_slices_and_to_the_step_with_a_validation_loss() -> None:
    found = measured(TrialLimits(1.0, steps=40), parts=4)
    assert [one.done for one in found] == [False, False, False, True]
    losses = [one.validation_loss for one in found]
    assert losses == sorted(losses, reverse=True)  # pyright: ignore[reportArgumentType] -- it learns
    assert found[-1].steps == 36  # 40 without the four that warm up


class Diverging(Digits):
    def loss(self, model: torch.nn.Module, batch: object) -> Loss:
        found = super().loss(model, batch)
        return Loss(found.sum * float("nan"), found.count, found.metrics, found.loads)


def test_a_run_that_diverges_is_not_measured() -> None:
    with pytest.raises(TrainingFailed, match="the loss is nan"):
        measured(TrialLimits(0.1), task=Diverging(Config.of(**TINY)))


def test_a_trial_of_few_steps_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = measured(TrialLimits(1.0, steps=2))
    assert (found.done, found.steps) == (True, 1)  # the other one warmed up


def test_what_does_not_compile_is_not_measured_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    handlers = len(logging.getLogger("torch._dynamo.guards.__recompiles").handlers)

    def broken(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend=broken))
    with pytest.raises(TrainingFailed, match="does not compile"):
        measured(TrialLimits(0.1), compile="on")
    assert len(logging.getLogger("torch._dynamo.guards.__recompiles").handlers) == handlers


class Large(Digits):
    def loss(self, model: torch.nn.Module, batch: object) -> Loss:
        raise torch.OutOfMemoryError("no room")


def test_out_of_memory_is_not_survived_in_halves() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="micro-batch of 16"):
        measured(TrialLimits(0.1), task=Large(Config.of(**TINY)))


def _measured_as(rank: int, size: int, path: str, strategy: str) -> tuple[float, int, list[str]]:
    with process_group_world(file_store(path, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        (found,) = measured(TrialLimits(0.2), world, parallel_strategy=strategy, workers=size, gpu_mode="cpu")
    return found.samples_per_second, found.steps, sorted(found.phases)


@pytest.mark.parametrize("strategy", ["data_parallel", "expert_parallel"])
def test_workers_measure_the_same_steps(strategy: str) -> None:
    (first, steps, phases), second = run_ranks(_measured_as, 2, strategy)
    assert second[1:] == (steps, phases)
    assert second[0] == pytest.approx(first, rel=0.3)
    assert "communication" in phases
