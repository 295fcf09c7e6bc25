"""What is traced, against numbers reckoned by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orchestrator.config.settings import Config
from orchestrator.measure.step_trace import TraceOptions, even_rows, trace_step
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Task, TensorData


class Linears(Task):
    """Two linear layers, 12 to 20 to 6."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(32, 12), torch.randint(6, (32,)))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


def traced(setting: TraceOptions | None = None, batch: int = 8, **settings: Any) -> MicroBatchOps:
    return trace_step(load_task(Config.of(**settings)), batch, setting)


def shapes(work: MicroBatchOps, of_experts: bool = False) -> dict[tuple[int, int, int, str], int]:
    return {(p.m, p.k, p.n, p.layout): p.times * p.batch for p in work.products if p.of_experts == of_experts}


def test_linear_layers_by_hand() -> None:
    """Forward x·Wᵀ, backward g·W (not for the input) and gᵀ·x."""
    work = trace_step(Linears(), 8)
    assert shapes(work) == {
        (8, 12, 20, "nt"): 1,
        (8, 20, 6, "nt"): 1,
        (8, 6, 20, "nn"): 1,
        (6, 8, 20, "tn"): 1,
        (20, 8, 12, "tn"): 1,
    }
    assert work.flops == 2 * 8 * (2 * 12 * 20 + 3 * 20 * 6)
    assert (work.parameters, work.tensors, work.expert_parameters) == (12 * 20 + 20 + 20 * 6 + 6, 4, 0)


def test_memory_of_linear_layers_by_hand() -> None:
    """At least the gradients of all weights; at most all that was ever made."""
    work = trace_step(Linears(), 8)
    made = sum(move.bytes * move.times for move in work.moves)
    assert 4 * work.parameters <= work.peak_bytes <= made + 100 * 512 + 4 * work.parameters


def test_an_moe_layer_by_hand() -> None:
    """Each of 4 experts has a quarter of 16 × 2 rows; SwiGLU's first product is twice as wide. Three products each."""
    work = traced(batch=16, task="digits", width=32, layers=1, experts=4, expert_hidden_size=24, top_k=2)
    assert shapes(work, of_experts=True) == {
        (8, 32, 48, "nn"): 4,
        (8, 24, 32, "nn"): 4,
        (8, 32, 24, "nt"): 4,
        (24, 8, 32, "tn"): 4,
        (8, 48, 32, "nt"): 4,
        (32, 8, 48, "tn"): 4,
    }
    assert sum(p.flops for p in work.products if p.of_experts) == 3 * 2 * 32 * (32 * 48 + 24 * 32)


def test_experts_one_after_another_are_more_operations_of_the_same_arithmetic() -> None:
    settings = {"task": "digits", "width": 32, "layers": 1, "experts": 4, "expert_hidden_size": 24}
    together, apart = (traced(TraceOptions(grouped=grouped), 16, **settings) for grouped in (True, False))
    assert apart.flops == together.flops
    assert apart.operations > together.operations
    assert shapes(apart, of_experts=True) == shapes(together, of_experts=True)


def test_what_goes_through_python_of_ours() -> None:
    """A layer on a GPU: eight fused kernels, and six products of all experts. On a CPU only these, in groups."""
    settings: dict[str, Any] = {"task": "text", "width": 64, "layers": 3}
    assert traced(TraceOptions(True, "bf16"), 4, **settings).launches == 3 * (8 + 6)
    assert traced(TraceOptions(), 4, **settings).launches == 3 * 6
    assert traced(TraceOptions(grouped=False), 4, **settings).launches == 0
    assert traced(TraceOptions(True, "bf16"), 4, **settings, experts=0).launches == 0


def test_what_a_gpu_sorts_for() -> None:
    """The rows of each MoE layer, and the gradients of an embedding where there are many tokens; on CPUs none are told apart."""
    settings: dict[str, Any] = {"task": "synthetic", "width": 16, "layers": 3, "context_length": 64}
    assert traced(TraceOptions(True, "bf16"), 64, **settings).sorts == 3 + 1
    assert traced(TraceOptions(True, "bf16"), 8, **settings).sorts == 3
    assert traced(TraceOptions(True, "bf16"), 64, **settings, experts=0).sorts == 1
    assert traced(TraceOptions(), 64, **settings).sorts == 0


def test_norms_and_their_derivatives_are_told_apart() -> None:
    work = traced(batch=8, task="digits", width=32, layers=2, experts=0)
    count = {
        kind: sum(move.times for move in work.moves if move.kind == kind)
        for kind in ("norm", "norm_backward")
    }
    assert count == {"norm": 3 + 2, "norm_backward": 3}  # and a softmax, there and back


@pytest.mark.parametrize(
    ("setting", "more", "waits"),
    [
        (TraceOptions(), {}, False),
        (TraceOptions(grouped=False), {}, True),
        (TraceOptions(hosts=2), {}, True),
        (TraceOptions(), {"capacity_factor": 1.5}, True),
        (TraceOptions(), {"expert_hidden_size": (16, 16, 24, 24)}, True),
        (TraceOptions(grouped=False), {"experts": 0}, False),
    ],
)
def test_where_the_host_waits_for_the_device(
    setting: TraceOptions, more: dict[str, Any], waits: bool
) -> None:
    """The last time in the last layer's forward pass: the backward pass is not before it."""
    settings = {"task": "digits", "width": 32, "layers": 2, "experts": 4, "expert_hidden_size": 24}
    work = traced(setting, 16, **(settings | more))
    assert (work.before_wait is not None) == waits
    if work.before_wait is not None:
        assert 0 < work.before_wait.operations < 0.7 * work.operations
        assert {entry.layout for entry in work.before_wait.products} <= {"nt", "nn"}


def test_a_transformer_by_hand() -> None:
    """Per layer qkv, out and two of the feed-forward block, three times each; attention; the output layer."""
    tokens, width, layers, vocabulary = 4 * 32, 64, 2, 100
    work = traced(
        batch=4,
        task="synthetic",
        experts=0,
        width=width,
        layers=layers,
        context_length=32,
        vocabulary=vocabulary,
        samples=8,
    )
    dense = 3 * 2 * tokens * (layers * 12 * width * width + width * vocabulary)
    assert sum(p.flops for p in work.products) == dense
    assert sum(a.flops for a in work.attentions) == layers * 7 * 4 * 32**2 * width
    assert {(a.heads, a.length, a.width, a.backward) for a in work.attentions} == {
        (4, 32, 64, False),
        (4, 32, 64, True),
    }


def test_work_grows_with_the_batch() -> None:
    small, large = (traced(batch=batch, task="digits") for batch in (16, 64))
    assert large.flops == 4 * small.flops
    assert large.operations == small.operations
    assert large.peak_bytes > small.peak_bytes


def test_on_a_gpu_low_precision_and_fused_kernels() -> None:
    settings: dict[str, Any] = {"task": "text", "width": 64, "layers": 1}
    on_cpu, on_gpu = (
        traced(setting, 4, **settings) for setting in (TraceOptions(), TraceOptions(True, "bf16"))
    )
    assert {p.precision for p in on_gpu.products if p.of_experts} == {"bf16"}
    assert sum(m.bytes * m.times for m in on_gpu.moves) < sum(m.bytes * m.times for m in on_cpu.moves)
    assert on_gpu.flops == on_cpu.flops


def test_what_travels_between_hosts() -> None:
    """Counts once and rows four times for each layer; a row out is a token's features with ids and weights of two experts."""
    work = traced(
        TraceOptions(hosts=2), 16, task="digits", width=32, layers=3, experts=4, expert_hidden_size=24
    )
    assert sum(m.times for m in work.messages if m.kind == "counts") == 3
    assert sum(m.times for m in work.messages if m.kind == "rows") == 4 * 3
    sent, _ = even_rows(16, 4, 2, 2, 1)
    away = sent[1][0]
    assert {m.bytes for m in work.messages if m.kind == "rows"} == {
        away * (32 * 4 + 8 + 8),
        away * 32 * 4,
        away * (32 * 4 + 8),
    }
    whole = traced(batch=16, task="digits", width=32, layers=3, experts=4, expert_hidden_size=24)
    assert work.expert_parameters == 3 * 2 * (32 * 48 + 24 * 32)
    assert whole.parameters - work.parameters == work.expert_parameters
    assert whole.expert_parameters == 0


def test_evenly_spread_tokens() -> None:
    """Of 12 tokens with 2 of 4 experts, 10 want either host of two (all but one pair in six); 12 pairs each. In chunks alike."""
    sent, received = even_rows(12, 4, 2, 2, 1)
    assert sent == [[10, 12], [10, 12]]
    assert received == [[10, 12], [10, 12]]
    parts, _ = even_rows(12, 4, 2, 2, 2)
    assert parts == [[5, 6, 5, 6], [5, 6, 5, 6]]
    nobody, _ = even_rows(8, 2, 1, 3, 1)
    assert nobody[2] == [0, 0]


def test_recomputing_is_more_arithmetic_and_less_memory() -> None:
    settings: dict[str, Any] = {
        "task": "synthetic",
        "experts": 0,
        "width": 64,
        "layers": 6,
        "context_length": 64,
        "samples": 16,
    }
    kept, again = (traced(TraceOptions(recompute=recompute), 8, **settings) for recompute in (False, True))
    assert kept.flops < again.flops < 1.4 * kept.flops
    assert again.peak_bytes < 0.8 * kept.peak_bytes


def test_tracing_leaves_nothing_behind() -> None:
    from experts.kernels import fused

    before = fused.available
    first = traced(TraceOptions(True, "bf16"), 4, task="digits")
    assert fused.available is before
    assert replace(traced(TraceOptions(True, "bf16"), 4, task="digits")) == first


@pytest.mark.parametrize("hosts", [3, 8, 16])
def test_more_hosts_than_divide_the_experts(hosts: int) -> None:
    work = traced(TraceOptions(hosts=hosts), 16, task="digits", experts=8)
    held = -(-8 // hosts)
    assert {p.batch for p in work.products if p.of_experts} == {held}
