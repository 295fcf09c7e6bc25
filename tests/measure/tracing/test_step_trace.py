"""Traced micro-batches, against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experts.kernels import launching
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.optim import adamw

ON_GPU = TraceOptions(on_gpu=True, precision="bf16")
ONE_BY_ONE = TraceOptions(grouped=False)
SMALL_MOE: dict[str, Any] = {"task": "digits", "width": 32, "experts": 4, "expert_hidden_size": 24}


class Linears(Task):
    """Two linear layers, 12 to 20 to 6."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(32, 12), torch.randint(6, (32,)))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


def traced(options: TraceOptions | None = None, batch: int = 8, **settings: Any) -> MicroBatchOps:
    return trace_micro_batch(load_task(Config.of(**settings)), batch, options)


def product_shapes(ops: MicroBatchOps, of_experts: bool = False) -> dict[tuple[int, int, int, str], int]:
    products = [product for product in ops.products if product.of_experts == of_experts]
    return {(p.m, p.k, p.n, p.layout): p.times * p.batch for p in products}


def moved_bytes(ops: MicroBatchOps) -> int:
    return sum(move.bytes * move.times for move in ops.moves)


def test_linear_layers_have_three_products_each() -> None:
    """Forward x·Wᵀ, backward g·W (not for the input) and gᵀ·x."""
    ops = trace_micro_batch(Linears(), 8)
    assert product_shapes(ops) == {
        (8, 12, 20, "nt"): 1,
        (8, 20, 6, "nt"): 1,
        (8, 6, 20, "nn"): 1,
        (6, 8, 20, "tn"): 1,
        (20, 8, 12, "tn"): 1,
    }
    assert ops.flops == 2 * 8 * (2 * 12 * 20 + 3 * 20 * 6)
    assert (ops.parameters, ops.tensors, ops.expert_parameters) == (12 * 20 + 20 + 20 * 6 + 6, 4, 0)


def test_an_moe_layer_has_two_products_per_expert_three_times() -> None:
    """Each of 4 experts has a quarter of 16 × 2 rows; SwiGLU's first product is twice as wide."""
    ops = traced(batch=16, layers=1, top_k=2, **SMALL_MOE)
    assert product_shapes(ops, of_experts=True) == {
        (8, 32, 48, "nn"): 4,
        (8, 24, 32, "nn"): 4,
        (8, 32, 24, "nt"): 4,
        (24, 8, 32, "tn"): 4,
        (8, 48, 32, "nt"): 4,
        (32, 8, 48, "tn"): 4,
    }
    assert sum(p.flops for p in ops.products if p.of_experts) == 3 * 2 * 32 * (32 * 48 + 24 * 32)


def test_experts_one_after_another_have_more_operations_and_the_same_arithmetic() -> None:
    grouped = traced(TraceOptions(), 16, layers=1, **SMALL_MOE)
    one_by_one = traced(ONE_BY_ONE, 16, layers=1, **SMALL_MOE)
    assert one_by_one.flops == grouped.flops
    assert one_by_one.operations > grouped.operations
    assert product_shapes(one_by_one, of_experts=True) == product_shapes(grouped, of_experts=True)


@pytest.mark.extended
def test_fused_kernels_and_grouped_products_are_launched_from_python() -> None:
    """A layer on a GPU has eight fused kernels and six grouped products; on a CPU only the
    products."""
    settings: dict[str, Any] = {"task": "text", "width": 64, "layers": 3}
    assert traced(ON_GPU, 4, **settings).launches == 3 * (8 + 6)
    assert traced(TraceOptions(), 4, **settings).launches == 3 * 6
    assert traced(ONE_BY_ONE, 4, **settings).launches == 0
    assert traced(ON_GPU, 4, **settings, experts=0).launches == 0


@pytest.mark.extended
def test_a_gpu_sorts_for_each_moe_layer_and_for_embeddings_of_many_tokens() -> None:
    """On CPUs sorts are not counted separately."""
    settings: dict[str, Any] = {"task": "synthetic", "width": 16, "layers": 3, "sequence_length": 64}
    assert traced(ON_GPU, 64, **settings).sorts == 3 + 1
    assert traced(ON_GPU, 8, **settings).sorts == 3
    assert traced(ON_GPU, 64, **settings, experts=0).sorts == 1
    assert traced(TraceOptions(), 64, **settings).sorts == 0


def test_norms_and_their_derivatives_are_different_kinds() -> None:
    ops = traced(batch=8, task="digits", width=32, layers=2, experts=0)
    norms = sum(move.times for move in ops.moves if move.kind == "norm")
    derivatives = sum(move.times for move in ops.moves if move.kind == "norm_backward")
    assert norms == 3 + 2  # three layer norms, and a softmax forward and backward
    assert derivatives == 3


@pytest.mark.parametrize(
    ("options", "changes", "waits"),
    [
        (TraceOptions(), {}, False),
        (ONE_BY_ONE, {}, True),
        (TraceOptions(hosts=2), {}, True),
        (TraceOptions(), {"capacity_factor": 1.5}, True),
        (TraceOptions(), {"expert_hidden_size": (16, 16, 24, 24)}, True),
        (ONE_BY_ONE, {"experts": 0}, False),
    ],
)
def test_the_host_waits_for_row_counts(options: TraceOptions, changes: dict[str, Any], waits: bool) -> None:
    """It waits for the last time in the last layer's forward pass, before the backward pass."""
    ops = traced(options, 16, **(SMALL_MOE | {"layers": 2} | changes))
    assert (ops.before_wait is not None) == waits
    if ops.before_wait is not None:
        assert 0 < ops.before_wait.operations < 0.7 * ops.operations
        assert {product.layout for product in ops.before_wait.products} <= {"nt", "nn"}


def test_the_arithmetic_of_a_transformer() -> None:
    """Per layer qkv, out and two products of the feed-forward block, three times each; attention;
    the output layer."""
    tokens = 4 * 32
    width = 64
    layers = 2
    vocabulary = 100
    ops = traced(
        batch=4,
        task="synthetic",
        experts=0,
        width=width,
        layers=layers,
        sequence_length=32,
        vocabulary=vocabulary,
        samples=8,
    )
    product_flops = 3 * 2 * tokens * (layers * 12 * width * width + width * vocabulary)
    assert sum(p.flops for p in ops.products) == product_flops
    assert sum(a.flops for a in ops.attentions) == layers * 7 * 4 * 32**2 * width
    attentions = {(a.heads, a.pairs, a.width, a.backward) for a in ops.attentions}
    assert attentions == {(4, 32**2 / 2, 64, False), (4, 32**2 / 2, 64, True)}


def test_arithmetic_grows_with_the_batch() -> None:
    small = traced(batch=16, task="digits")
    large = traced(batch=64, task="digits")
    assert large.flops == 4 * small.flops
    assert large.operations == small.operations


def test_a_gpu_has_low_precision_and_fused_kernels() -> None:
    settings: dict[str, Any] = {"task": "text", "width": 64, "layers": 1}
    on_cpu = traced(TraceOptions(), 4, **settings)
    on_gpu = traced(ON_GPU, 4, **settings)
    assert {p.precision for p in on_gpu.products if p.of_experts} == {"bf16"}
    assert moved_bytes(on_gpu) < moved_bytes(on_cpu)
    assert on_gpu.flops == on_cpu.flops


def test_recomputation_has_more_arithmetic() -> None:
    settings: dict[str, Any] = {
        "task": "synthetic",
        "experts": 0,
        "width": 64,
        "layers": 6,
        "sequence_length": 64,
        "samples": 16,
    }
    saved = traced(TraceOptions(recompute=False), 8, **settings)
    recomputed = traced(TraceOptions(recompute=True), 8, **settings)
    assert saved.flops < recomputed.flops < 1.4 * saved.flops


def test_recomputed_experts_have_their_forward_products_twice() -> None:
    settings: dict[str, Any] = {"layers": 3, **SMALL_MOE, "expert_hidden_size": 256}
    saved = traced(TraceOptions(), 64, **settings)
    recomputed = traced(TraceOptions(recompute_experts=True), 64, **settings)
    forward = {"nn": 2, "nt": 1, "tn": 1}
    before = product_shapes(saved, of_experts=True)
    assert product_shapes(recomputed, of_experts=True) == {
        shape: times * forward[shape[3]] for shape, times in before.items()
    }
    assert product_shapes(recomputed) == product_shapes(saved)


def test_experts_of_recomputed_blocks_are_recomputed_once() -> None:
    settings: dict[str, Any] = {"layers": 3, **SMALL_MOE}
    blocks = traced(TraceOptions(recompute=True), 16, **settings)
    assert traced(TraceOptions(recompute=True, recompute_experts=True), 16, **settings) == blocks


def test_kept_copies_are_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four experts of 3 x 32 x 24 weights in each of two layers: 18,432 of the trained parameters."""
    settings: dict[str, Any] = {"layers": 2, **SMALL_MOE}
    cast = traced(ON_GPU, 512, **settings)
    monkeypatch.setattr(adamw, "LARGE", 1)
    kept = traced(replace(ON_GPU, keeps_copies=True), 512, **settings)
    weights = 2 * 4 * 3 * 32 * 24
    assert kept.products == cast.products
    # Forward: fp32 read and bf16 written. Backward: the other way round.
    assert moved_bytes(cast) - moved_bytes(kept) == 2 * (4 + 2) * weights


def test_recomputation_over_several_hosts_exchanges_tokens_once() -> None:
    """The recomputed pass replays the row counts of the first pass."""
    saved = traced(TraceOptions(hosts=2), 16, layers=3, **SMALL_MOE)
    recomputed = traced(TraceOptions(hosts=2, recompute=True), 16, layers=3, **SMALL_MOE)
    assert recomputed.flops > saved.flops
    assert recomputed.messages == saved.messages


def test_tracing_restores_the_process() -> None:
    before = launching.available
    first = traced(ON_GPU, 4, task="digits")
    assert launching.available is before
    assert traced(ON_GPU, 4, task="digits") == first
