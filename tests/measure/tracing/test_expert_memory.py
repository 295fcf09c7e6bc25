"""The memory of experts in the plan's estimate, against bytes counted from real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.balance import gated_layers, moe_layers
from harness.fakes.inventories import gpu, machine, planned
from harness.runs.live_bytes import LiveBytes
from harness.runs.steppers import make_stepper, run_steps
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.estimate import ModelFacts, estimate_memory
from orchestrator.plan.pass_memory import Moment
from orchestrator.plan.planning import Plan
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.tasks.validate import as_loss
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.data.steps import as_dataset
from orchestrator.train.device.precision import autocast
from orchestrator.train.optim import adamw, named_optimizers
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.weight_copies import WeightCopies
from orchestrator.types import PrecisionName

SETTINGS: dict[str, Any] = {
    "width": 16,
    "layers": 2,
    "sequence_length": 8,
    "vocabulary": 16,
    "samples": 64,
    "experts": 7,
    "expert_hidden_size": (32,),
    "top_k": 2,
}
SAMPLES = 8
ONE_GPU = machine(gpu())
TWO_GPUS = machine(gpu(), gpu(1))


def synthetic() -> Synthetic:
    return Synthetic(Config.of(**SETTINGS))


def kept_bytes(recomputes: bool, precision: PrecisionName) -> int:
    """Return the bytes that a forward pass leaves for the backward pass."""
    task = synthetic()
    batch = first_samples(as_dataset(task.train_data()), SAMPLES)
    torch.manual_seed(0)
    model = task.build_model().train()
    for _, layer in moe_layers(model):
        layer.bank.recomputes = recomputes
    with LiveBytes() as live, autocast(precision, torch.device("cpu")):
        loss, _ = as_loss(task.loss(model, batch), SAMPLES)
    kept = live.total()
    del loss
    return kept


def before_gradients(facts: ModelFacts, moments: Sequence[Moment]) -> float:
    """Return the most bytes of a pass before its first gradient is complete."""
    return max(facts.passes.alive(moment, SAMPLES) for moment in moments if not moment.gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_experts_keep_their_inputs_alone(precision: PrecisionName) -> None:
    """A GPU's kernels keep the tensors that the loop keeps on a CPU."""
    facts = model_facts(synthetic(), "cuda:0", precision)
    estimated = before_gradients(facts, facts.passes.saved)
    estimated -= before_gradients(facts, facts.passes.experts_recomputed)
    counted = kept_bytes(False, precision) - kept_bytes(True, precision)
    # In bf16 casts of weights that are freed count in part as kept: the estimate is too high.
    assert estimated == pytest.approx(counted, rel=0.03 if precision == "fp32" else 0.4)
    assert estimated <= 1.03 * counted
    assert counted > 0.4 * kept_bytes(False, precision)


def test_experts_of_recomputed_blocks_are_recomputed_once() -> None:
    facts = model_facts(synthetic(), "cuda:0", "fp32")
    both = estimate_memory(replace(facts, recomputes_experts=True), SAMPLES, True, None)
    assert both == estimate_memory(facts, SAMPLES, True, None)


def plan_with_copies(monkeypatch: pytest.MonkeyPatch, inventory: Any = ONE_GPU, **settings: Any) -> Plan:
    monkeypatch.setattr(adamw, "LARGE", 1)
    task = synthetic()
    facts = model_facts(task, "cuda:0", "bf16")
    defaults: dict[str, Any] = {"batch_size": SAMPLES, "precision": "bf16"}
    return planned(inventory, facts, **defaults | settings)


@pytest.mark.parametrize("passes", [1, 2])
def test_copies_of_weights_and_their_gradients_are_counted(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    plan = plan_with_copies(monkeypatch, accumulation_steps=passes)
    monkeypatch.setattr(
        named_optimizers,
        "build_adamw",
        lambda groups, settings, *_: AdamW(groups, settings.peak_learning_rate, settings.betas, settings.eps),
    )
    stepper, feed = make_stepper(synthetic(), SAMPLES // passes, SAMPLES, precision="bf16")
    model = stepper.strategy.model
    assert isinstance(stepper.optimizer.inner, AdamW)
    stepper.copies = WeightCopies(model, stepper.optimizer.inner, torch.bfloat16)
    run_steps(stepper, feed, 1)
    gates = {id(p) for _, layer in gated_layers(model) for p in layer.gate.parameters()}
    gradients = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in gates]
    assert plan.accumulation_steps.value == passes
    assert plan.memory.weight_copies == sum(tensor.nbytes for tensor in stepper.copies.tensors) > 0
    assert plan.memory.gradients == sum(gradient.nbytes for gradient in gradients)


@pytest.mark.extended
def test_kept_copies_replace_those_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted once, and stay whole where blocks are recomputed."""
    copied = plan_with_copies(monkeypatch).memory
    monkeypatch.setattr(adamw, "LARGE", 10**9)
    facts = model_facts(synthetic(), "cuda:0", "bf16")
    cast = planned(ONE_GPU, facts, batch_size=SAMPLES, precision="bf16").memory
    assert cast.weight_copies == 0
    assert copied.weight_copies + copied.activations == pytest.approx(cast.activations, rel=2e-3)
    recomputed = plan_with_copies(monkeypatch, activation_checkpointing="on").memory
    assert recomputed.weight_copies == copied.weight_copies


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw8bit"},
        {"precision": "fp16"},
        {"inventory": TWO_GPUS, "parallel_strategy": "data_parallel"},
        {"inventory": machine(cpu_bf16=True)},
    ],
)
def test_other_runs_keep_no_copies(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    assert plan_with_copies(monkeypatch, **settings).memory.weight_copies == 0


def test_an_average_is_a_part_of_its_own() -> None:
    facts = model_facts(synthetic(), "cuda:0", "fp32")
    without = planned(ONE_GPU, facts, batch_size=SAMPLES).memory
    averaged = planned(ONE_GPU, facts, batch_size=SAMPLES, ema_decay=0.99).memory
    assert averaged.average == without.gradients
    assert averaged.optimizer == without.optimizer
    assert averaged.gate - without.gate == 4 * facts.gate_parameters
    assert averaged.total - without.total == 4 * facts.trainable
