"""Trials: the throughput and its interval, and the steps that several workers agree on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from orchestrator.config.settings import Config
from orchestrator.errors import TrainingFailed, UserError
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.trial import TrialLimits, TrialResult, open_trial
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.trainer import Trainer

TINY: dict[str, Any] = {"width": 8, "expert_hidden_size": (8,), "experts": 2, "layers": 1, "batch_size": 16}


def run_trial(
    limits: TrialLimits,
    world: World | None = None,
    task: Digits | None = None,
    parts: int = 1,
    **settings: Any,
) -> list[TrialResult]:
    """Run a trial to its end in this many parts; return the result after each."""
    config = Config.of(**TINY, **settings)
    plan = Trainer(config=config).prepare().plan
    facts = model_facts(Digits(config), "cpu", "fp32")
    world = world or World.single_process()
    with open_trial(config, plan, facts, task or Digits(config), world, limits) as trial:
        results = [trial.run_part(1 / parts)]
        while not results[-1].done:
            results.append(trial.run_part(1 / parts))
    return results


@pytest.mark.extended
def test_a_trial_ends_when_it_is_precise_or_out_of_time() -> None:
    (result,) = run_trial(TrialLimits(0.3))
    assert result.done
    # Short last batches are skipped.
    assert result.samples_per_second == pytest.approx(16 / result.step_seconds, rel=1e-6)
    assert set(result.phases) == {"data", "forward", "backward", "optimizer"}
    assert sum(result.phases.values()) == pytest.approx(result.step_seconds, rel=0.5)
    assert result.validation_loss is None
    assert result.peak_memory_bytes > 2**20


@pytest.mark.extended
def test_a_trial_of_given_steps_pauses_and_evaluates() -> None:
    results = run_trial(TrialLimits(1.0, steps=40), parts=4)
    assert [result.done for result in results] == [False, False, False, True]
    losses = [result.validation_loss or 0.0 for result in results]
    assert losses == sorted(losses, reverse=True), "the model learns"
    assert results[-1].steps == 36  # 40 without the warm-up


@pytest.mark.extended
def test_a_trial_of_few_steps_runs_no_more() -> None:
    (result,) = run_trial(TrialLimits(1.0, steps=2))
    assert (result.done, result.steps) == (True, 1)  # the other step is the warm-up


@pytest.mark.extended
def test_a_trial_has_the_validation_metrics_and_misses_none() -> None:
    (result,) = run_trial(TrialLimits(1.0, steps=2, metric="accuracy"))
    assert 0 <= result.metrics["accuracy"] <= 1
    with pytest.raises(
        UserError,
        match=r"--objective 'acuracy' \(did you mean 'accuracy'\?\) is not among .*: loss, accuracy",
    ):
        run_trial(TrialLimits(1.0, steps=2, metric="acuracy"))


class Diverging(Digits):
    def loss(self, model: torch.nn.Module, batch: object) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * float("nan"), loss.count, loss.metrics, loss.loads)


@pytest.mark.extended
def test_a_diverging_run_has_no_throughput() -> None:
    with pytest.raises(TrainingFailed, match="the loss is nan"):
        run_trial(TrialLimits(0.1), task=Diverging(Config.of(**TINY)))


@pytest.mark.extended
def test_a_model_that_does_not_compile_is_not_measured_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    real_compile = torch.compile
    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    num_handlers = len(logger.handlers)

    def broken_backend(*_: object) -> None:
        raise RuntimeError("this backend does not work")

    monkeypatch.setattr(torch, "compile", lambda call, **_: real_compile(call, backend=broken_backend))
    with pytest.raises(TrainingFailed, match="does not compile"):
        run_trial(TrialLimits(0.1), compile="on")
    assert len(logger.handlers) == num_handlers


class TooLarge(Digits):
    def loss(self, model: torch.nn.Module, batch: object) -> Loss:
        raise torch.OutOfMemoryError("too large")


@pytest.mark.extended
def test_a_trial_that_runs_out_of_memory_is_not_measured_in_halves() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="micro-batch of 16"):
        run_trial(TrialLimits(0.1), task=TooLarge(Config.of(**TINY)))


def _run_rank(rank: int, size: int, path: str, strategy: str) -> tuple[float, int, list[str]]:
    store = file_store(path, size)
    with process_group_world(store, rank, size, torch.device("cpu"), "gloo", 60) as world:
        settings = {"parallel_strategy": strategy, "workers": size, "gpu_mode": "cpu"}
        (result,) = run_trial(TrialLimits(0.2), world, **settings)
    return result.samples_per_second, result.steps, sorted(result.phases)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("strategy", ["data_parallel", "expert_parallel"])
def test_workers_measure_the_same_steps(strategy: str) -> None:
    (first_rate, steps, phases), (second_rate, *second) = run_ranks(_run_rank, 2, strategy)
    assert second == [steps, phases]
    assert second_rate == pytest.approx(first_rate, rel=0.3)
    assert "communication" in phases
