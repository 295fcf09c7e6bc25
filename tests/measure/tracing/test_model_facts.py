"""Facts of a model, found without computing anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.run.prepared_run import loss_note
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Loss, Task, TensorData


@pytest.mark.parametrize(("capacity", "limited"), [(None, False), (1.25, True)])
def test_a_capacity_of_experts_is_a_fact_of_the_model(capacity: float | None, limited: bool) -> None:
    task = load_task(Config.of(task="digits", experts=4, width=16, capacity_factor=capacity))
    assert model_facts(task, "cpu", "fp32").limits_capacity is limited


class Counting(Task):
    """A linear model whose loss is returned in a form of the test's."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        self.form = form

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> TensorData:
        return TensorData(torch.zeros(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.form(model(batch[0]))


@pytest.mark.parametrize(
    ("form", "counts_batches"),
    [
        (lambda out_B1: Loss(out_B1.mean(), 1), True),
        (lambda out_B1: (out_B1.mean(), 1), True),
        (lambda out_B1: Loss(out_B1.sum(), len(out_B1)), False),
        (lambda out_B1: (out_B1.sum(), torch.ones_like(out_B1).sum()), False),
        (lambda out_B1: out_B1.mean(), False),
    ],
)
def test_a_mean_that_is_declared_as_a_sum_is_noticed(
    form: Callable[[Tensor], Any], counts_batches: bool
) -> None:
    facts = model_facts(Counting(form), "cpu", "fp32")
    assert facts.counts_batches is counts_batches
    assert bool(loss_note(facts)) is counts_batches
    assert loss_note(replace(facts, unit="tokens")) is None


class TooLarge(Task):
    """A model of 16 GB whose loss cannot be traced without numbers."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2**16, 2**16, bias=False)

    def train_data(self) -> TensorData:
        return TensorData(torch.zeros(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise RuntimeError("this loss needs numbers")


def test_a_large_model_that_cannot_be_traced_is_not_built() -> None:
    with pytest.raises(
        UserError, match=r"4\.3G parameters \(16\.0 GiB\).*RuntimeError: this loss needs numbers"
    ):
        model_facts(TooLarge(), "cpu", "fp32")


VOCABULARY = 50_257


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tokens", [83, 84, 128, 512])
def test_a_loss_in_chunks_costs_the_same_for_each_sample(tokens: int, device: str) -> None:
    """From 84 tokens on: so it is for the two samples of a trace, and for the four."""
    sizes = {"width": 64, "layers": 2, "experts": 0, "samples": 8}
    config = Config.of(task="synthetic", vocabulary=VOCABULARY, sequence_length=tokens, **sizes)
    facts = model_facts(load_task(config), device, "fp32")
    hidden_bytes = tokens * 64 * 4
    logits_bytes = tokens * VOCABULARY * 4
    per_sample = max(moment.per_sample for moment in facts.passes.saved)
    if tokens < 84:
        assert per_sample > logits_bytes
    else:
        assert 10 * hidden_bytes < per_sample < 100 * hidden_bytes < logits_bytes
    # Of the output layer; and of two blocks, which have 2 × 12 × 64² weights, and attention.
    output_flop = 2 * tokens * VOCABULARY * 64
    assert output_flop < facts.flops_per_sample < 1.2 * output_flop, "the forward pass alone"


class Average(nn.Module):
    """Keeps an average of its inputs, in a new tensor for each pass."""

    mean: Tensor

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2), persistent=persistent)

    def forward(self, x_B2: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x_B2.detach().mean(0)
        return x_B2 - self.mean


class Normed(Counting):
    """A model with a further layer. A pass that reads a number cannot be traced, and is run."""

    def __init__(self, layer: Callable[[], nn.Module], reads_a_number: bool) -> None:
        super().__init__(
            lambda out_B1: out_B1.sum() * (float(out_B1.sum().isfinite()) if reads_a_number else 1)
        )
        self.layer = layer

    def build_model(self) -> nn.Module:
        return nn.Sequential(self.layer(), super().build_model())


@pytest.mark.parametrize("reads_a_number", [False, True], ids=["traced", "run"])
@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (lambda: nn.BatchNorm1d(2), "0.num_batches_tracked"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "0.parametrizations.weight.0._u"),
        (Average, "0.mean"),
        (lambda: Average(persistent=False), ""),
        (lambda: nn.BatchNorm1d(2, track_running_stats=False), ""),
        (lambda: nn.LayerNorm(2), ""),
    ],
)
def test_a_buffer_that_a_pass_changes_is_found(
    layer: Callable[[], nn.Module], buffer: str, reads_a_number: bool
) -> None:
    facts = model_facts(Normed(layer, reads_a_number), "cpu", "fp32")
    assert facts.method.startswith("run" if reads_a_number else "traced")
    assert facts.changed_buffer == buffer


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", ["digits", "synthetic", "text"])
def test_no_built_in_task_changes_a_buffer(name: str) -> None:
    task = load_task(Config.of(task=name, experts=4, width=16))
    assert model_facts(task, "cpu", "fp32").changed_buffer == ""
