"""Messages and products of divided experts, with tokens spread evenly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experts.balance import moe_layers
from experts.transformers.registration import use
from harness.lm.families import build
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.measure.tracing.traced_experts import even_rows, record_experts
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.load import load_task

SMALL_MOE: dict[str, Any] = {
    "task": "digits",
    "width": 32,
    "layers": 3,
    "experts": 4,
    "expert_hidden_size": 24,
}


def traced(hosts: int, samples: int = 16, **settings: Any) -> MicroBatchOps:
    return trace_micro_batch(load_task(Config.of(**settings)), samples, TraceOptions(hosts=hosts))


def moved_bytes(ops: MicroBatchOps) -> int:
    return sum(move.bytes * move.times for move in ops.moves)


def test_a_layer_exchanges_counts_once_and_rows_four_times() -> None:
    """A row out is a token's features with the ids and weights of two experts."""
    ops = traced(2, **SMALL_MOE)
    assert sum(message.times for message in ops.messages if message.kind == "counts") == 3
    assert sum(message.times for message in ops.messages if message.kind == "rows") == 4 * 3
    sent, _ = even_rows(16, 4, 2, 2, 1)
    remote_rows = sent[1][0]
    assert {message.bytes for message in ops.messages if message.kind == "rows"} == {
        remote_rows * (32 * 4 + 8 + 8),
        remote_rows * 32 * 4,
        remote_rows * (32 * 4 + 8),
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_hosts_exchange_counts_of_choices_to_limit_their_experts(recompute: bool) -> None:
    """A host sends 8 counts (4 experts, 2 choices) in a message of 64; a recomputed pass sends none."""
    task = load_task(Config.of(**SMALL_MOE, capacity_factor=1.25))
    ops = trace_micro_batch(task, 16, TraceOptions(hosts=2, recompute=recompute))
    counts = [message for message in ops.messages if message.kind == "counts"]
    assert sum(message.times for message in counts) == 2 * 3
    assert {message.bytes for message in counts} == {64 * 8}
    without_limit = trace_micro_batch(
        load_task(Config.of(**SMALL_MOE)), 16, TraceOptions(hosts=2, recompute=recompute)
    )
    assert ops.products == without_limit.products


def test_the_first_host_holds_its_own_experts() -> None:
    one_host = traced(1, **SMALL_MOE)
    two_hosts = traced(2, **SMALL_MOE)
    assert two_hosts.expert_parameters == 3 * 2 * (32 * 48 + 24 * 32)
    assert one_host.parameters - two_hosts.parameters == two_hosts.expert_parameters
    assert one_host.expert_parameters == 0


def test_a_loop_over_experts_moves_the_gradient_of_their_weights_once() -> None:
    """A slice of the stack for each expert would have a gradient of the whole stack, and their sum."""
    settings = SMALL_MOE | {"experts": 32, "expert_hidden_size": 512, "layers": 1}
    task = load_task(Config.of(**settings))
    grouped, loop = (
        trace_micro_batch(task, 64, TraceOptions(on_gpu=True, precision="bf16", grouped=grouped))
        for grouped in (True, False)
    )
    stack_bytes = 2 * 32 * (32 * 1024 + 512 * 32)
    assert moved_bytes(loop) < moved_bytes(grouped) + 4 * stack_bytes


@pytest.mark.parametrize("hosts", [3, 8, 16])
def test_the_first_host_holds_the_most_experts_if_they_do_not_divide(hosts: int) -> None:
    ops = traced(hosts, task="digits", experts=8)
    assert {product.batch for product in ops.products if product.of_experts} == {-(-8 // hosts)}


def test_tokens_are_sent_once_to_each_host_that_has_their_experts() -> None:
    """Of 12 tokens with 2 of 4 experts, 10 go to either of two hosts (all but one pair in six); 12
    pairs each."""
    sent, received = even_rows(12, 4, 2, 2, 1)
    assert sent == [[10, 12], [10, 12]]
    assert received == [[10, 12], [10, 12]]
    in_chunks, _ = even_rows(12, 4, 2, 2, 2)
    assert in_chunks == [[5, 6, 5, 6], [5, 6, 5, 6]]
    fewer_experts_than_hosts, _ = even_rows(8, 2, 1, 3, 1)
    assert fewer_experts_than_hosts[2] == [0, 0]


def test_biases_of_experts_are_recorded_with_their_gradients() -> None:
    """Experts of GPT-OSS have biases, which are looked up for each row."""
    recorder = OpRecorder()
    model = use(build("GPT-OSS", torch.float32))
    record_experts(model, True, recorder)
    with recorder:
        model(input_ids=torch.zeros(2, 5, dtype=torch.int64)).logits.sum().backward()
    (_, layer), *_ = moe_layers(model)
    roles = {name.rpartition("_")[0] for name, p in layer.bank.named_parameters() if p.grad is not None}
    assert roles == {"up", "down", "up_bias", "down_bias"}
    (bias,) = [p for name, p in layer.bank.named_parameters() if name.startswith("up_bias")]
    rows = 2 * 5 * layer.top_k
    looked_up = rows * bias.shape[1] * 4
    read = bias.nbytes + rows * 8
    assert looked_up + read in {move.bytes for move in recorder.recorded_ops().moves}
