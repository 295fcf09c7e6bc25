"""The arithmetic of convolutions and attention, by hand: the same on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.ops import AttentionOp
from orchestrator.plan.estimate import estimate_memory
from orchestrator.tasks.task import Task, TensorData
from orchestrator.types import PrecisionName

aten: Any = torch.ops.aten
SAMPLES = 8
HEADS, LENGTH, KEYS, WIDTH = 2, 24, 40, 16


class Images(Task):
    """A convolution of 3 × 12 × 20 pixels before one of the test's, whose input has 8 × 6 × 10."""

    def __init__(self, second: nn.Module) -> None:
        self.second = second

    def build_model(self) -> nn.Module:
        first = nn.Conv2d(3, 8, kernel_size=3, stride=2, padding=1)
        return nn.Sequential(first, self.second)

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(SAMPLES, 3, 12, 20))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()


FIRST = 2 * (6 * 10) * (3 * 9) * 8
"""FLOP of a sample: positions × weights of an output × outputs."""
SECONDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: nn.Conv2d(8, 16, 3), 2 * (4 * 8) * (8 * 9) * 16),
    "strided and dilated": (lambda: nn.Conv2d(8, 4, 2, stride=2, dilation=2), 2 * (2 * 4) * (8 * 4) * 4),
    "in groups": (lambda: nn.Conv2d(8, 16, 3, groups=4), 2 * (4 * 8) * (2 * 9) * 16),
    "by channel": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * (6 * 10) * 9 * 8),
    "transposed": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), 2 * (6 * 10) * 8 * (4 * 4)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", SECONDS)
def test_the_arithmetic_of_convolutions(kind: str, device: str) -> None:
    make, second = SECONDS[kind]
    facts = model_facts(Images(make()), device, "fp32")
    assert facts.flops_per_sample == FIRST + second


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("kind", SECONDS)
def test_a_backward_pass_computes_the_gradients_of_weights_and_inputs(kind: str, on_gpu: bool) -> None:
    """None of the pixels: the first convolution has two products, the second three."""
    make, second = SECONDS[kind]
    ops = trace_micro_batch(Images(make()), SAMPLES, TraceOptions(on_gpu=on_gpu))
    assert ops.flops == SAMPLES * (2 * FIRST + 3 * second)
    assert sum(product.times for product in ops.products) == 5


class Attending(Task):
    """A layer of weights before attention as the test wants it."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor], keys: int) -> None:
        self.attend = attend
        self.keys = keys

    def build_model(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(SAMPLES, HEADS, self.keys, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x_BHKW = model(batch[0])
        return self.attend(x_BHKW[:, :, :LENGTH], x_BHKW).float().mean()


def attend(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda query, key: F.scaled_dot_product_attention(query, key, key, **options)


def attend_with_mask(query: Tensor, key: Tensor) -> Tensor:
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


def attend_past_padding(query: Tensor, key: Tensor) -> Tensor:
    mask = torch.ones(len(key), 1, 1, key.shape[-2], dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


ATTENTION: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, float]] = {
    "causal": (attend(is_causal=True), LENGTH, LENGTH**2 / 2),
    "whole": (attend(), LENGTH, LENGTH**2),
    "of other keys": (attend(), KEYS, LENGTH * KEYS),
    "masked": (attend_with_mask, LENGTH, LENGTH**2 / 2),
    "of other keys, masked": (attend_with_mask, KEYS, LENGTH * KEYS),
    "of other keys, causal": (attend(is_causal=True), KEYS, LENGTH**2 / 2),
    "past padding": (attend_past_padding, LENGTH, LENGTH**2),
}
"""The call, the number of keys, and the pairs that are computed."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_the_arithmetic_of_attention(kind: str, device: str) -> None:
    call, keys, pairs = ATTENTION[kind]
    facts = model_facts(Attending(call, keys), device, "fp32")
    assert facts.method.startswith("traced"), "with fake tensors"
    assert facts.flops_per_sample == HEADS * (2 * keys * WIDTH**2 + 2 * 2 * pairs * WIDTH)


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_backward_pass_of_attention_has_five_products(kind: str) -> None:
    call, keys, pairs = ATTENTION[kind]
    ops = trace_micro_batch(Attending(call, keys), SAMPLES)
    found = {(op.heads, op.pairs, op.width, op.backward, op.times) for op in ops.attentions}
    heads = SAMPLES * HEADS
    assert found == {(heads, pairs, WIDTH, False, 1), (heads, pairs, WIDTH, True, 1)}


def attend_to_narrow_values(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key[..., :8], is_causal=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value_width", [None, 8])
def test_a_gpu_fuses_attention_that_a_cpu_does_not(value_width: int | None, precision: PrecisionName) -> None:
    """A trace without a GPU finds its operations, and no products or memory of all pairs."""
    call = attend_to_narrow_values if value_width else attend(dropout_p=0.1, is_causal=True)
    task = Attending(call, LENGTH)
    ops = trace_micro_batch(task, SAMPLES, TraceOptions(on_gpu=True, precision=precision))
    pairs = LENGTH**2 / 2
    op = AttentionOp(SAMPLES * HEADS, pairs, WIDTH, precision=precision, value_width=value_width)
    assert set(ops.attentions) == {op, replace(op, backward=True)}
    assert sum(product.times for product in ops.products) == 2, "those of the layer"
    facts = model_facts(task, "cuda", precision)
    features = WIDTH + (value_width or WIDTH)
    assert facts.flops_per_sample == HEADS * (2 * LENGTH * WIDTH**2 + 2 * pairs * features)
    fused = model_facts(Attending(attend(is_causal=True), LENGTH), "cuda", precision)
    assert estimate_memory(facts, 64, False, None).total <= estimate_memory(fused, 64, False, None).total


class Encoder(Task):
    """A layer of an encoder, whose attention is inside of another function of torch."""

    def __init__(self, dropout: float) -> None:
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 64, self.dropout, batch_first=True)
        return nn.ModuleList([layer])

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(SAMPLES, LENGTH, HEADS * WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (layer,) = model.children()
        return layer(batch[0]).mean()


def test_a_gpu_fuses_the_attention_of_an_encoder_with_dropout() -> None:
    traces = [trace_micro_batch(Encoder(p), SAMPLES, TraceOptions(on_gpu=True)) for p in (0.1, 0.0)]
    with_dropout, without = traces
    assert without.attentions
    assert with_dropout.attentions == without.attentions
    assert with_dropout.products == without.products
    on_cpu = trace_micro_batch(Encoder(0.1), SAMPLES)
    assert not on_cpu.attentions, "a CPU computes whole matrices"


def test_queries_after_the_last_key_attend_to_all_keys() -> None:
    query, key = torch.randn(1, HEADS, KEYS, WIDTH), torch.randn(1, HEADS, LENGTH, WIDTH)
    with OpRecorder() as recorder:
        attend(is_causal=True)(query, key)
    (op,) = recorder.recorded_ops().attentions
    assert op.pairs == LENGTH**2 / 2 + (KEYS - LENGTH) * LENGTH


def efficient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(query, key, value, None, compute_log_sumexp=True)[0]


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(query, key, value, None, compute_log_sumexp=True)[0]


@pytest.mark.parametrize("operator", [efficient, cudnn])
@pytest.mark.parametrize("value_width", [WIDTH, 8])
def test_values_may_be_narrower_than_keys(operator: Callable[..., Tensor], value_width: int) -> None:
    """As in DeepSeek's attention. The count is torch's, which is right where all pairs are computed."""
    widths = (WIDTH, WIDTH, value_width)
    tensors = [torch.randn(3, HEADS, LENGTH, width, device="meta", requires_grad=True) for width in widths]
    with FlopCounterMode(display=False) as counter, OpRecorder() as recorder:
        operator(*tensors).sum().backward()
    assert recorder.recorded_ops().flops == counter.get_total_flops() > 0
    with OpRecorder() as of_forward, torch.no_grad():
        operator(*tensors)
    assert of_forward.flops == 2 * 3 * HEADS * LENGTH**2 * (WIDTH + value_width)
