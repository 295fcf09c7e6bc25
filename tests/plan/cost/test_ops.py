"""Arithmetic and bytes of operations, by hand."""

from __future__ import annotations

from orchestrator.plan.cost.ops import AttentionOp, MessageOp, MicroBatchOps, MoveOp, ProductOp


def test_a_product_multiplies_and_adds_for_each_of_its_batch_and_times():
    assert ProductOp(2, 3, 5).flops == 2 * 2 * 3 * 5
    assert ProductOp(2, 3, 5, batch=7, times=11).flops == 2 * 2 * 3 * 5 * 7 * 11


def test_attention_has_two_products_forward_and_five_backward():
    assert AttentionOp(3, 128, 8, times=2).flops == 2 * (2 * 3 * 128 * 8) * 2
    assert AttentionOp(3, 128, 8, backward=True).flops == 5 * (2 * 3 * 128 * 8)


def test_a_micro_batch_has_the_arithmetic_of_its_products_and_attentions():
    ops = MicroBatchOps(1, products=(ProductOp(2, 3, 5),) * 2, attentions=(AttentionOp(3, 128, 8),))
    assert ops.flops == 2 * 60 + 2 * (2 * 3 * 128 * 8)


def test_gradients_of_experts_on_one_device_are_not_reduced():
    assert MicroBatchOps(1, parameters=1000, expert_parameters=400).gradient_bytes == 2400.0


def test_an_operation_runs_once_and_a_micro_batch_is_empty_unless_told():
    assert [ProductOp(1, 1, 1).times, ProductOp(1, 1, 1).batch, AttentionOp(1, 1, 1).times] == [1, 1, 1]
    assert [MoveOp("plain", 1).times, MessageOp("rows", 1).times] == [1, 1]
    assert not ProductOp(1, 1, 1).of_experts
    assert not AttentionOp(1, 1, 1).backward
    empty = MicroBatchOps(1)
    counts = (empty.operations, empty.launches, empty.sorts, empty.views, empty.tensors)
    assert {*counts, empty.parameters, empty.expert_parameters} == {0}
