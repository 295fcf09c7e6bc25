"""Experts of a traced model: products and messages are recorded as if tokens were spread evenly
over the experts.

Shape suffixes: R rows, D width, H hidden size, E experts of a size class, K inner and N outer size
of a product; in ``counts_NC``, N hosts and C counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import comb
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from experts.balance import moe_layers
from experts.kernels.general import two_products
from experts.kernels.grouped import grouped_works
from experts.kernels.loop import row_counts
from experts.kernels.packed_product import Matrices, PackedStack, experts_that_fit
from experts.model import attach, place
from experts.moe.bank import ExpertBank, SizeClass
from experts.moe.context import MoEContext
from experts.moe.routed import RoutedExperts
from experts.tokens.exchange import Exchange, LocalExchange, Meter, PendingRows
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.train.optim.weight_copies import copied_stacks

_CPU = torch.device("cpu")
_OFFSET_OPERATIONS = 8  # small operations of a grouped product: sums and checks of its offsets
_UNPACKING_OPERATIONS = 12  # of one packed part
_COUNT_BYTES = 8
_COUNT_ALIGNMENT = 64  # counts
NO_COPIES: Mapping[Tensor, Tensor] = {}


def divide_experts(model: nn.Module, hosts: int, chunks: int, recorder: OpRecorder) -> MoEContext:
    """Leave the experts of the first of several hosts to the model; record its messages to the
    others."""
    layers = [layer for _, layer in moe_layers(model)]
    if hosts == 1 or not layers:
        context = MoEContext(LocalExchange())
    else:
        host_of = [[expert % hosts for expert in range(len(layer.load_E))] for layer in layers]
        place(model, host_of, 0)
        context = _EvenlySpreadContext(_RecordingExchange(hosts, recorder), chunks)
        for layer in layers:
            layer.register_forward_pre_hook(context.enter)
    attach(model, context)
    return context


def copies_of_stacks(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return copies in bf16 of the stacks that an optimizer keeps copies of; see ``WeightCopies``."""
    stacks = [stack for _, _, stack in copied_stacks(model)]
    return {stack: stack.detach().to(torch.bfloat16).requires_grad_() for stack in stacks}


def record_experts(
    model: nn.Module, grouped: bool, recorder: OpRecorder, copies: Mapping[Tensor, Tensor] = NO_COPIES
) -> None:
    """Replace the computation of the model's experts by records of their products.

    ``copies`` are computed with in place of their stacks, which are not cast then."""
    for _, layer in moe_layers(model):
        layer.bank._compute = partial(_record_bank, layer.bank, grouped, recorder, copies)
        if layer.capacity is not None:
            layer.register_forward_pre_hook(partial(_record_capacity, recorder))


def _record_capacity(recorder: OpRecorder, layer: nn.Module, _: Any) -> None:
    """Record the counts of choices that hosts exchange to limit their experts' rows.

    In one process the host reads how many rows are left."""
    assert isinstance(layer, RoutedExperts)
    context = layer.context
    if context.exchange.size == 1:
        recorder.record_wait()
    elif not context.replaying:
        num_experts = len(layer.load_E)
        top_k = layer.top_k
        counts_NC = torch.empty(context.exchange.size, num_experts * top_k, dtype=torch.int64)
        context.exchange.all_to_all_counts(counts_NC, (num_experts, top_k))


class _RecordingExchange:
    """An exchange with hosts that do not exist: messages are recorded instead of sent."""

    rank = 0

    def __init__(self, size: int, recorder: OpRecorder) -> None:
        self.size = size
        self.recorder = recorder

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        self.recorder.record_wait()
        num_counts = counts_NC.shape[1] + len(header) + 1
        aligned = -(-num_counts // _COUNT_ALIGNMENT) * _COUNT_ALIGNMENT
        self.recorder.record_message("counts", _COUNT_BYTES * (self.size - 1) * aligned)
        return torch.empty(0)  # fake tensors have no counts; see _EvenlySpreadContext

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        remote_rows = len(rows) - send_counts[0]
        self.recorder.record_message("rows", remote_rows * rows.stride(0) * rows.itemsize)
        return PendingRows(received, None, Meter())


class _EvenlySpreadContext(MoEContext):
    """A context whose row counts are those of evenly spread tokens: fake tensors have no values to
    count."""

    def __init__(self, exchange: Exchange, chunks: int) -> None:
        super().__init__(exchange, chunks)
        self._even_counts: tuple[list[list[int]], list[list[int]]] = ([], [])

    def enter(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, RoutedExperts)
        tokens = arguments[0].numel() // arguments[0].shape[-1]
        self._even_counts = even_rows(
            tokens, len(layer.load_E), layer.top_k, self.exchange.size, self.num_chunks
        )

    def replayed(self, compute: Callable[[], Any]) -> Any:
        # Inside ``super``, so that a recomputed pass replays the even counts too.
        def compute_or_even() -> Any:
            try:
                return compute()
            except DataDependentOutputException:
                return self._even_counts

        return super().replayed(compute_or_even)


def even_rows(
    tokens: int, experts: int, top_k: int, hosts: int, chunks: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the counts that the first host sends to each host, and receives from each, by chunk.

    Each chunk has a count of rows and a count of (token, expert) pairs. Tokens choose all experts
    with the same probability, and a token is sent once to a host that has any of its experts.
    """
    experts_of_host = [len(range(host, experts, hosts)) for host in range(hosts)]
    chunk_sizes = [tokens * (chunk + 1) // chunks - tokens * chunk // chunks for chunk in range(chunks)]
    sent = []
    for local_experts in experts_of_host:
        probability = 1 - comb(experts - local_experts, top_k) / comb(experts, top_k)
        counts = []
        for size in chunk_sizes:
            counts.append(round(size * probability))
            counts.append(round(size * top_k * local_experts / experts))
        sent.append(counts)
    return sent, [sent[0]] * hosts


def _record_bank(
    bank: ExpertBank,
    grouped: bool,
    recorder: OpRecorder,
    copies: Mapping[Tensor, Tensor],
    group: SizeClass,
    rows_RD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
) -> Tensor:
    """Record the products of a bank, with the rows split evenly over its experts. Takes the place
    of its ``_compute``."""
    dtype = rows_RD.dtype
    stacks = {role: bank.get_parameter(f"{role}_{group.hidden}") for role in bank.form.roles}
    packed = {role: bank.form.packed(role, bank.width, group.hidden) for role in bank.form.roles}
    weights: dict[str, Matrices] = {}
    for role, stack in stacks.items():
        form = packed[role]
        weights[role] = copies.get(stack, stack).to(dtype) if form is None else PackedStack(stack, form)
    fused = grouped and grouped_works(_CPU, dtype, bank.width, group.hidden)
    if (
        not fused or len(bank.classes) > 1 or bank.form.packing is not None
    ):  # the host must know the rows of each expert, or of each size class
        recorder.record_wait()
    if fused:
        recorder.record_small_operations(_OFFSET_OPERATIONS)
        return _record_experts(bank, recorder, rows_RD, weights, weights_R)
    sizes = row_counts(counts_E, rows_RD.shape[0])
    # Split once, as the loop does: a slice for each expert would have a gradient as large as the whole stack.
    slices = {role: _split(stack) for role, stack in weights.items()}
    outputs = [
        _record_experts(bank, recorder, rows, {role: own[number] for role, own in slices.items()}, scales)
        for number, (rows, scales) in enumerate(
            zip(rows_RD.split(sizes), weights_R.split(sizes), strict=True)
        )
    ]
    return torch.cat(outputs)


def _split(stack: Matrices) -> Sequence[Matrices]:
    """Return the matrices of each expert as a stack of one."""
    if isinstance(stack, Tensor):
        return stack.split(1)
    return [PackedStack(packed, stack.form) for packed in stack.packed_EB.split(1)]


def _record_experts(
    bank: ExpertBank,
    recorder: OpRecorder,
    rows_RD: Tensor,
    weights: Mapping[str, Matrices],
    weights_R: Tensor,
) -> Tensor:
    def product(rows_RK: Tensor, matrices: Matrices) -> Tensor:
        result: Any
        if isinstance(matrices, PackedStack):
            result = _PackedProduct.apply(rows_RK, matrices, recorder)
        else:
            result = _ExpertProduct.apply(rows_RK, matrices, recorder)
        return result

    # Biases are looked up by the expert of each row; which one it is changes nothing that is recorded.
    expert_R = torch.empty(0, dtype=torch.int64)
    if bank.form.bias:
        expert_R = torch.zeros(len(rows_RD), dtype=torch.int64)
    return two_products(product, rows_RD, weights, expert_R, weights_R, bank.form.activate)


class _ExpertProduct(torch.autograd.Function):
    """Rows times the matrices of their experts: one product forward, and one backward for each of the
    two that needs a gradient."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, weights_EKN: Tensor, recorder: OpRecorder) -> Tensor:
        ctx.save_for_backward(rows_RK, weights_EKN)
        ctx.recorder = recorder
        experts, inner, outer = weights_EKN.shape
        recorder.record_expert_product(rows_RK.shape[0], experts, (inner, outer), "nn", rows_RK.dtype)
        return rows_RK.new_empty(rows_RK.shape[0], outer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ARG004
        rows_RK, weights_EKN = ctx.saved_tensors
        experts, inner, outer = weights_EKN.shape
        record = ctx.recorder.record_expert_product
        rows_need_it, weights_need_it, _ = ctx.needs_input_grad
        if rows_need_it:
            record(rows_RK.shape[0], experts, (outer, inner), "nt", rows_RK.dtype)
        if weights_need_it:
            record(rows_RK.shape[0], experts, (inner, outer), "tn", rows_RK.dtype)
        return (
            torch.empty_like(rows_RK) if rows_need_it else None,
            torch.empty_like(weights_EKN) if weights_need_it else None,
            None,
        )


class _PackedProduct(torch.autograd.Function):
    """Rows times packed matrices, which are unpacked one after another in each pass."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, stack: PackedStack, recorder: OpRecorder) -> Tensor:
        ctx.stack = stack
        ctx.recorder = recorder
        _record_packed(rows_RK, stack, recorder, "nt")
        return rows_RK.new_empty(len(rows_RK), stack.form.outer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_RN,) = grads
        _record_packed(grad_RN, ctx.stack, ctx.recorder, "nn")
        return grad_RN.new_empty(len(grad_RN), ctx.stack.form.inner), None, None


def _record_packed(rows: Tensor, stack: PackedStack, recorder: OpRecorder, form: Literal["nn", "nt"]) -> None:
    """Record the product, and the operations that unpack each matrix before it."""
    experts = len(stack.packed_EB)
    matrix = stack.form.unpack(stack.packed_EB[0], rows.dtype)
    outer, inner = stack.form.shape
    sizes = (inner, outer) if form == "nt" else (outer, inner)
    recorder.record_expert_product(len(rows), experts, sizes, form, rows.dtype)
    operations = experts * stack.form.parts * _UNPACKING_OPERATIONS
    if recorder.on_gpu:  # one kernel unpacks many experts
        operations = -(-experts // experts_that_fit(stack.form, rows.dtype.itemsize))
    recorder.record_small_operations(operations)
    del matrix
