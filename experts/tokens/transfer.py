"""Transfers of rows between hosts, with gradients.

Tokens are sent to the hosts of their experts, and outputs come back. Rows go in one message each
way: a row holds the features of a token and, on the way to the experts, the ids and weights of the
experts it is for. Each transfer is split into a function that sends and one that receives, so that
experts can compute on one chunk while the next is on its way, in the forward and in the backward
pass. See ``types`` for the letters of shapes.

The two functions are joined by a ticket, a scalar without content. It is an edge of the autograd graph:
backward, the receiving function runs first and sends the gradients, and the sending function waits for
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.tokens.bounds import HEADER_BYTES
from experts.tokens.dispatch import sum_in_order
from experts.tokens.exchange import Exchange, PendingRows
from experts.types import RowMap

_ALIGNMENT_BYTES = 8  # each section of a packed row starts at a multiple of this


@dataclass(frozen=True)
class TransferPlan:
    """The rows of one chunk: their tokens, and how many go to and come from each host.

    Without counts, as many go to each host and come from each."""

    row_map: RowMap
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


class Transfer:
    """Rows on their way in the forward pass, and their gradients in the backward pass.

    Gradients go the opposite way. Received tensors are handed over and not kept: the autograd graph
    holds the transfer, so that a reference from the transfer back to the graph would keep both
    alive for ever."""

    def __init__(self, exchange: Exchange, plan: TransferPlan) -> None:
        self.exchange = exchange
        self.plan = plan
        self.pending_rows: PendingRows | None = None
        self.pending_grads: PendingRows | None = None
        self.header_N4: Tensor | None = None
        """The header of the rows to each host, which their last row holds; None if counts were exchanged."""
        self.received_header_N4: Tensor | None = None

    def wait_for_rows(self) -> Tensor:
        pending = self.pending_rows
        assert pending is not None, "no rows were sent"
        self.pending_rows = None
        return pending.wait()

    def wait_for_grads(self) -> Tensor:
        pending = self.pending_grads
        assert pending is not None, "no gradients were sent"
        self.pending_grads = None
        return pending.wait()

    def start(self, rows: Tensor) -> PendingRows:
        """Send rows to the hosts that the plan names."""
        return self.exchange.all_to_all_rows(rows, self.plan.send_counts, self.plan.receive_counts)

    def start_reversed(self, rows: Tensor) -> PendingRows:
        """Send rows to the hosts that the plan receives from: outputs, or gradients of tokens."""
        return self.exchange.all_to_all_rows(rows, self.plan.receive_counts, self.plan.send_counts)


@dataclass(frozen=True)
class Layout:
    """The sections of a packed row: features, weights and expert ids, each at an offset in bytes."""

    width: int
    dtype: torch.dtype
    top_k: int
    weight_dtype: torch.dtype

    @classmethod
    def of(cls, x_TD: Tensor, weights_TK: Tensor) -> Layout:
        return cls(x_TD.shape[1], x_TD.dtype, weights_TK.shape[1], weights_TK.dtype)

    @property
    def weights(self) -> int:
        return _aligned(self.width * self.dtype.itemsize)

    @property
    def ids(self) -> int:
        return self.weights + _aligned(self.top_k * self.weight_dtype.itemsize)

    @property
    def size(self) -> int:
        return self.ids + _aligned(self.top_k * torch.int32.itemsize)

    def new_packed(self, num_rows: int, with_ids: bool, device: torch.device) -> Tensor:
        """Return memory for packed rows. Padding, which nothing is written to, is zero."""
        size = self.size if with_ids else self.ids
        used = self.width * self.dtype.itemsize + self.top_k * self.weight_dtype.itemsize
        used += self.top_k * torch.int32.itemsize if with_ids else 0
        create = torch.empty if used == size else torch.zeros
        return create(num_rows, size, dtype=torch.uint8, device=device)

    def features_of(self, packed: Tensor) -> Tensor:
        """Return a view of the features of packed rows."""
        return _section(packed, 0, self.width, self.dtype)

    def weights_of(self, packed: Tensor) -> Tensor:
        return _section(packed, self.weights, self.top_k, self.weight_dtype)

    def ids_of(self, packed: Tensor) -> Tensor:
        return _section(packed, self.ids, self.top_k, torch.int32)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _section(packed: Tensor, begin: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a view of a section of packed rows."""
    return packed[:, begin : begin + columns * dtype.itemsize].view(dtype)


def _headers(packed: Tensor, num_hosts: int) -> Tensor:
    """Return a view of the header of each host: the numbers in the last row from or to that host."""
    # With bounded rows each host has the same number of rows, so that the buffer divides evenly.
    last = packed.view(num_hosts, -1, packed.shape[1])[:, -1]
    return last[:, :HEADER_BYTES].view(torch.int64)


def send(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_SK: Tensor,
    anchor: Tensor,
    transfer: Transfer,
) -> Tensor:
    """Send tokens to the hosts of their experts. Returns a ticket to pass to ``receive``.

    ``anchor`` is any tensor that requires a gradient. Through it the backward pass reaches this
    exchange on every host, also on one whose rows need no gradient. The exchange is a collective: a host
    that left it out would block the others."""
    ticket: Tensor = _Send.apply(x_TD, weights_TK, ids_SK, anchor, transfer)
    return ticket


def receive(
    ticket: Tensor, transfer: Transfer, x_TD: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, weights and expert ids of the tokens received.

    Width and types are those of ``x_TD`` and ``weights_TK``."""
    return _Receive.apply(ticket, transfer, Layout.of(x_TD, weights_TK))


def send_back(rows_GD: Tensor, anchor: Tensor, transfer: Transfer) -> Tensor:
    """Send outputs back to the hosts that the tokens came from.

    Returns a ticket to pass to ``receive_back``."""
    ticket: Tensor = _SendBack.apply(rows_GD, anchor, transfer)
    return ticket


def receive_back(ticket: Tensor, transfer: Transfer) -> Tensor:
    """Return the outputs for this host's tokens: a row for each host that a token was sent to."""
    rows_SD: Tensor = _ReceiveBack.apply(ticket, transfer)
    return rows_SD


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_SK: Tensor,
        anchor: Tensor,
        transfer: Transfer,
    ) -> Tensor:
        layout = Layout.of(x_TD, weights_TK)
        token_S = transfer.plan.row_map.token_R
        packed = layout.new_packed(len(token_S), with_ids=True, device=x_TD.device)
        # Straight into the message: rows are copied once.
        torch.index_select(x_TD, 0, token_S, out=layout.features_of(packed))
        torch.index_select(weights_TK, 0, token_S, out=layout.weights_of(packed))
        layout.ids_of(packed).copy_(ids_SK)
        if transfer.header_N4 is not None:
            _headers(packed, len(transfer.header_N4)).copy_(transfer.header_N4)
        transfer.pending_rows = transfer.start(packed)
        ctx.transfer = transfer
        ctx.layout = layout
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ARG004
        transfer: Transfer = ctx.transfer
        layout: Layout = ctx.layout
        packed = transfer.wait_for_grads()
        grad_SD = layout.features_of(packed)
        grad_SK = layout.weights_of(packed)
        # A token that was sent to several hosts sums their gradients, in the order of hosts.
        row_map = transfer.plan.row_map
        return sum_in_order(grad_SD, row_map), sum_in_order(grad_SK, row_map), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, transfer: Transfer, layout: Layout) -> Any:
        packed = transfer.wait_for_rows()
        # A copy: with a view, the transfer would keep the message in memory.
        if transfer.header_N4 is not None:
            transfer.received_header_N4 = _headers(packed, len(transfer.header_N4)).clone()
        rows_GD = layout.features_of(packed)
        weights_GK = layout.weights_of(packed).contiguous()
        ids_GK = layout.ids_of(packed).long()
        ctx.transfer = transfer
        ctx.layout = layout
        ctx.ticket = (ticket.dtype, ticket.device)
        ctx.mark_non_differentiable(ids_GK)
        return rows_GD, weights_GK, ids_GK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        transfer: Transfer = ctx.transfer
        layout: Layout = ctx.layout
        grad_GD, grad_GK, _ = grads
        # Ids have no gradient: a packed row of gradients ends where the ids would begin.
        packed = layout.new_packed(len(grad_GD), with_ids=False, device=grad_GD.device)
        layout.features_of(packed).copy_(grad_GD)
        layout.weights_of(packed).copy_(grad_GK)
        transfer.pending_grads = transfer.start_reversed(packed)
        return _zero_grad_of(ctx.ticket), None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_GD: Tensor, anchor: Tensor, transfer: Transfer) -> Tensor:
        transfer.pending_rows = transfer.start_reversed(rows_GD)
        ctx.transfer = transfer
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ARG004
        transfer: Transfer = ctx.transfer
        return transfer.wait_for_grads(), None, None


class _ReceiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        ctx.ticket = (ticket.dtype, ticket.device)
        return transfer.wait_for_rows()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        transfer: Transfer = ctx.transfer
        transfer.pending_grads = transfer.start(grads[0])
        return _zero_grad_of(ctx.ticket), None


def _zero_grad_of(ticket: tuple[torch.dtype, torch.device]) -> Tensor:
    """Return the gradient of a ticket, which has no content either."""
    dtype, device = ticket
    return torch.zeros((), dtype=dtype, device=device)
