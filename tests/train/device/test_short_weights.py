"""Weights in bf16, beside a model in fp32 that has the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.runs.bits import newest_state
from harness.runs.loop_runs import run_loop
from harness.runs.steppers import UNEVEN_EXPERTS, gradients, make_stepper, run_steps
from orchestrator.checkpoint.files import load
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.text import Text
from orchestrator.train.device.short_weights import computing_weights, lengthen_weights, shorten_weights
from orchestrator.trainer import Trainer

BF16: dict[str, Any] = {"weight_precision": "bf16"}


class RoundedText(Text):
    """A model in fp32 whose weights are numbers of bf16."""

    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)


@pytest.mark.parametrize(
    ("precision", "recompute"),
    [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)],
)
def test_losses_and_gradients_are_those_of_a_model_in_fp32(precision: str, recompute: bool) -> None:
    config = UNEVEN_EXPERTS.but(vocabulary=300)
    found: list[tuple[float, dict[str, Tensor]]] = []
    for short in (False, True):
        options: dict[str, Any] = {"precision": precision, "recompute": recompute, "clip_norm": 0.0}
        # Several micro-batches, whose gradients are summed.
        stepper, feed = make_stepper(
            RoundedText(config), 3, 9, weight_precision="bf16" if short else "fp32", **options
        )
        (totals,) = run_steps(stepper, feed, 1)
        assert {p.dtype for p in stepper.strategy.model.parameters()} == {
            torch.bfloat16 if short else torch.float32
        }
        found.append((float(totals.loss), gradients(stepper.strategy.model)))
    (loss, expected), (short_loss, actual) = found
    assert short_loss == loss
    for name, gradient in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], gradient), name


def test_parameters_are_their_own_again_after_a_pass_that_fails() -> None:
    model = Digits(UNEVEN_EXPERTS).build_model()
    shorten_weights(model)
    before = dict(model.named_parameters())
    types: list[torch.dtype] = []

    def fail(*_: Any) -> None:
        types.extend(p.dtype for p in model.parameters())
        raise ZeroDivisionError

    model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), computing_weights(model, "fp32"):
        model(torch.zeros(1))
    assert set(types) == {torch.float32}
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_a_model_in_another_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"weight is in torch\.float64; build the model in fp32"):
        shorten_weights(nn.Linear(2, 2).double())


def test_the_model_at_the_end_computes_in_any_type() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    shorten_weights(model)
    lengthen_weights(model)
    tokens = torch.arange(5)
    assert model(tokens).dtype == torch.float32
    model(tokens).sum().backward()
    assert model.double()(tokens).dtype == torch.float64


def test_a_run_in_two_parts_is_the_same_to_the_bit(tmp_path: Path) -> None:
    _, whole = run_loop(tmp_path / "whole", max_steps=9, **BF16)
    run_loop(tmp_path / "parts", max_steps=4, **BF16)
    _, parts = run_loop(tmp_path / "parts", max_steps=9, resume="auto", **BF16)
    assert parts == whole
    assert newest_state(tmp_path / "parts") == newest_state(tmp_path / "whole")
    saved = load(tmp_path / "whole" / "checkpoints" / "step_00000009").tensors
    assert {t.dtype for name, t in saved["model"].items() if "weight" in name} == {torch.bfloat16}
    _, other_seed = run_loop(tmp_path / "fp32", max_steps=9)
    assert whole != other_seed
    assert whole == pytest.approx(other_seed, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graph": "on"}, "cuda_graph on"),
        ({"task": "lm", "model": "a", "lora": 4}, "lora 4"),
    ],
)
def test_settings_that_need_weights_in_fp32_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"weight_precision bf16 and {message}.*leave one of them out"):
        Config.of(**BF16, **settings)


def test_the_plan_counts_two_bytes_for_a_weight() -> None:
    short, full = (
        Trainer(config=Config.of(workers=1, gpu_mode="cpu", **settings), quiet=True).prepare().plan.memory
        for settings in (BF16, {})
    )
    assert short.parameters == full.parameters / 2
    assert (short.gradients, short.optimizer) == (full.gradients, full.optimizer)


@pytest.mark.extended
def test_the_plan_counts_gathered_weights_in_fp32() -> None:
    sharded: dict[str, Any] = {"workers": 4, "gpu_mode": "cpu", "evolution": "off"}
    plans = [
        Trainer(config=Config.of(**sharded, **settings), quiet=True).prepare().plan.memory
        for settings in (BF16, BF16 | {"sharding": "zero2"}, {"sharding": "zero2"})
    ]
    whole, short, full = (memory.parameters for memory in plans)
    assert short == pytest.approx(whole / 4 + 2 * whole)
    assert full == pytest.approx(short + whole / 4)


class BuiltInBf16(Digits):
    """A task that builds its model in bf16 by itself, and gives it inputs in bf16."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, labels = batch
        return nn.functional.cross_entropy(model(x.bfloat16()).float(), labels)


def test_a_model_that_was_built_in_bf16_trains_resumes_and_ends_as_it_is(tmp_path: Path) -> None:
    task = BuiltInBf16(Config.of(task="digits"))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "workers": 1, "plots": "off", "trackers": ()}
    settings |= {"gpu_mode": "cpu", "precision": "fp32", "evolution": "off", "batch_size": 8}
    Trainer(task=task, config=Config.of(**settings, max_steps=2), quiet=True).fit()
    result = Trainer(task=task, config=Config.of(**settings, max_steps=4, resume="auto"), quiet=True).fit()
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}


def test_a_table_of_positions_is_added_in_fp32() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.position = nn.Parameter(torch.ones(1, 3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.position

    model = Positions()
    shorten_weights(model)
    with computing_weights(model, "bf16"), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 3, 4)).dtype == torch.float32


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.7


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Embedding(5, 4),
        lambda: nn.Embedding(5, 4, padding_idx=2),
        lambda: nn.Embedding(5, 4, scale_grad_by_freq=True),
        lambda: Scaled(5, 4),
    ],
    ids=["plain", "padded", "by frequency", "own forward"],
)
def test_gradients_of_embeddings_are_added_up_in_fp32(build: Any) -> None:
    short = build()
    full = build()
    full.load_state_dict({"weight": short.weight.detach().bfloat16().float()})
    shorten_weights(short)
    short.weight.grad_dtype = torch.float32
    ids = torch.arange(300) % 5
    factors = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    for model in (short, full):
        with computing_weights(model, "bf16"), torch.autocast("cpu", torch.bfloat16):
            output = model(ids)
            assert output.dtype == torch.float32
            (output * factors).sum().backward()
    assert torch.equal(short.weight.grad, full.weight.grad)


class ScaledAndTied(nn.Module):
    """As Gemma's: a table that multiplies its rows, and is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Scaled(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def test_a_tied_table_with_a_forward_of_its_own_computes_as_in_fp32() -> None:
    short, full = ScaledAndTied(), ScaledAndTied()
    numbers = short.table.weight.detach().bfloat16().float()
    full.table.load_state_dict({"weight": numbers})
    shorten_weights(short)
    ids = torch.arange(5)
    with computing_weights(short, "bf16"), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(short.table(ids), full.table(ids))
        assert torch.equal(short(ids), full(ids))


def test_a_table_may_be_called_by_keyword() -> None:
    table = nn.Embedding(5, 4)
    shorten_weights(table)
    with computing_weights(table, "bf16"), torch.autocast("cpu", torch.bfloat16):
        assert table(input=torch.arange(5)).dtype == torch.float32


class OwnPrecision(nn.Module):
    """A head outside of autocast, as models have it that keep a product in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(hidden.float())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_outside_of_autocast_computes_in_fp32(compiled: bool) -> None:
    short, full = OwnPrecision(), OwnPrecision()
    full.load_state_dict({name: p.bfloat16().float() for name, p in short.state_dict().items()})
    shorten_weights(short)
    for parameter in short.parameters():
        parameter.grad_dtype = torch.float32
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    outputs: list[Tensor] = []
    for model in (short, full):
        forward = torch.compile(model, backend="eager") if compiled else model
        with computing_weights(model, "bf16"), torch.autocast("cpu", torch.bfloat16):
            outputs.append(forward(x))
            outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    found, expected = short.head.weight.grad, full.head.weight.grad
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert short.head.weight.dtype == torch.bfloat16
    assert dict(short.named_parameters()).keys() == dict(full.named_parameters()).keys()
