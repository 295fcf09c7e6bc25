"""Traces of a few blocks count for all blocks, as a trace of the whole model has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.lm.large_models import CONFIGS, PARAMETERS, LargeModel
from orchestrator.measure.tracing import repeated_blocks
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.estimate import estimate_memory
from orchestrator.tasks.task import Task, TensorData

TINY_QWEN = LargeModel(
    {
        **CONFIGS["Qwen3-30B-A3B"],
        "vocab_size": 31,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 11,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "mlp_only_layers": [0, 5, 6],
        "intermediate_size": 24,
    },
    sequence_length=16,
)
"""Its blocks are of two kinds, in no regular order."""


@pytest.fixture
def traced_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks that the passes of a trace had."""
    numbers: list[int] = []
    keeping = repeated_blocks.RepeatedBlocks.keeping

    def counted(self: Any, selected: Any) -> Any:
        numbers.append(len(selected))
        return keeping(self, selected)

    monkeypatch.setattr(repeated_blocks.RepeatedBlocks, "keeping", counted)
    return numbers


def in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_blocks, "_MIN_BLOCKS", 10**6)


def counts(ops: MicroBatchOps) -> dict[str, Any]:
    fields = {name: getattr(ops, name) for name in ("operations", "launches", "sorts", "flops")}
    for name in ("products", "attentions", "moves", "messages"):
        fields[name] = {replace(op, times=1): op.times for op in getattr(ops, name)}
    return fields


@pytest.mark.extended
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("hosts", [1, 3])
def test_a_trace_of_few_blocks_has_the_operations_of_all(
    hosts: int, recompute: bool, traced_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TraceOptions(True, "bf16", True, hosts, hosts, recompute)
    few = trace_micro_batch(TINY_QWEN, 2, options)
    assert traced_blocks == [2, 3, 3]
    in_full(monkeypatch)
    whole = trace_micro_batch(TINY_QWEN, 2, options)
    assert len(traced_blocks) == 3
    assert counts(few) == counts(whole)
    assert few.parameters == whole.parameters
    assert few.tensors == whole.tensors
    assert few.views == pytest.approx(whole.views, rel=0.01)
    if whole.before_wait is not None:
        assert few.before_wait is not None
        assert counts(few.before_wait) == counts(whole.before_wait)


@pytest.mark.extended
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_facts_of_few_blocks_are_those_of_all(
    device: str, traced_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = model_facts(TINY_QWEN, device, "bf16")
    assert traced_blocks == [4, 4]
    in_full(monkeypatch)
    whole = model_facts(TINY_QWEN, device, "bf16")
    assert replace(few, passes=whole.passes, flops_per_sample=whole.flops_per_sample) == whole
    assert few.flops_per_sample == pytest.approx(whole.flops_per_sample)
    for recompute in (False, True):
        for samples in (1, 3, 64):
            least, needed = (
                estimate_memory(facts, samples, recompute, None, single_pass=True).total
                for facts in (whole, few)
            )
            assert needed == pytest.approx(least, rel=0.01)


class Skips(Task):
    """Eight blocks with a connection from the first to the last, by their numbers."""

    def build_model(self) -> nn.Module:
        return SkipModel()

    def train_data(self) -> TensorData:
        return TensorData(torch.zeros(8, 4))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()


class SkipModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x_BD: Tensor) -> Tensor:
        for number in range(8):
            x_BD = self.blocks[number](x_BD)
        return x_BD


def test_a_model_that_needs_all_of_its_blocks_is_traced_as_a_whole() -> None:
    ops = trace_micro_batch(Skips(), 2)
    assert sum(product.times for product in ops.products) == 8 * 3 - 1


class EveryTwice(SkipModel):
    def forward(self, x_BD: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x_BD = block(x_BD)
        return x_BD


class SharedBlocks(Skips):
    def build_model(self) -> nn.Module:
        return EveryTwice()


def test_blocks_that_run_twice_are_traced_as_a_whole() -> None:
    ops = trace_micro_batch(SharedBlocks(), 2)
    assert sum(product.times for product in ops.products) == 16 * 3 - 1


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_large_models_are_traced_with_few_blocks_and_have_all_parameters(
    name: str, traced_blocks: list[int]
) -> None:
    facts = model_facts(LargeModel(CONFIGS[name], 64), "cuda", "bf16")
    assert facts.parameters == PARAMETERS[name]
    assert traced_blocks == [2, 2]
    assert facts.blocks == CONFIGS[name]["num_hidden_layers"]
