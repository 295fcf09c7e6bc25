"""Copies of tokens for the experts of this host, and the sums of their outputs.

``dispatch`` sorts rows by expert and returns a Trip; ``sum_rows`` needs nothing but its row map.
Forward and backward sums run in a fixed order. See ``types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.kernels import fused, launching, slot_sort
from experts.types import RowMap, Trip


def dispatch(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    num_slots: int,
    num_rows: int | None = None,
) -> tuple[Tensor, Trip]:
    """Return rows for the experts, sorted by local slot and within a slot by token.

    ``slots_TK`` is -1 for an absent choice, one that is not for this host. ``num_rows`` counts the
    other choices; None says that no choice is absent."""
    trip = sort_by_slot(slots_TK, weights_TK, num_slots, num_rows)
    return copy_rows(x_TD, trip.row_map), trip


@dataclass(frozen=True)
class SlotOrder:
    """Choices of tokens, sorted by slot and within a slot by token."""

    key_R: Tensor
    """Slots in ascending order, absent choices last."""
    index_R: Tensor
    """Place of each choice in the flat (T, K) table before sorting."""
    ends_L: Tensor
    """Where the choices of each slot end."""
    top_k: int

    @classmethod
    def of(cls, key_TK: Tensor, num_slots: int) -> SlotOrder:
        """Sort choices by key: a slot, or ``num_slots`` for an absent choice."""
        # Stable: within a slot, rows stay in the order of tokens, so that results are reproducible.
        key_R, index_R = key_TK.reshape(-1).to(key_dtype(num_slots)).sort(stable=True)
        slot_L = torch.arange(num_slots, device=key_R.device).to(key_R.dtype)
        # The keys are sorted, so a binary search finds the counts, without atomics on a GPU.
        ends_L = torch.searchsorted(key_R, slot_L, right=True)
        return cls(key_R, index_R, ends_L, key_TK.shape[1])

    def counts_L(self) -> Tensor:
        """Return the choices per slot."""
        return torch.diff(self.ends_L, prepend=self.ends_L.new_zeros(1))

    def row_map(self, num_rows: int | None, bounded: bool = False) -> RowMap:
        """Return the map of the first ``num_rows`` choices; None says that no choice is absent.

        With ``bounded`` there may be absent choices among them, whose rows are not summed."""
        index_R = self.index_R[:num_rows]
        # The inverse of the order: where each choice went.
        row_R = torch.arange(len(index_R), device=index_R.device)
        if bounded:
            row_R = torch.where(self.key_R[:num_rows] < len(self.ends_L), row_R, -1)
        row_TK = torch.full_like(self.index_R, -1).scatter_(0, index_R, row_R).view(-1, self.top_k)
        return RowMap(index_R // self.top_k, row_TK, complete=num_rows is None)


def sort_by_slot(
    slots_TK: Tensor,
    weights_TK: Tensor,
    num_slots: int,
    num_rows: int | None,
    bounded: bool = False,
) -> Trip:
    """Sort choices by local slot and within a slot by token; see ``dispatch`` for the arguments.

    With ``bounded`` the device alone knows how many choices are absent, and ``num_rows`` is a bound:
    the rows after the last slot's are not to be computed, and rows beyond the bound are lost."""
    if slot_sort.available(slots_TK, num_slots):
        rows = slot_sort.EVERY if num_rows is None else num_rows
        index_R, token_R, row_TK, counts_L = slot_sort.sort_choices(slots_TK, num_slots, rows)
        row_map = RowMap(token_R, row_TK, complete=num_rows is None)
    else:
        # Absent choices get the key after the last slot: they are sorted to the end and cut off there.
        key_TK = slots_TK if num_rows is None else torch.where(slots_TK < 0, num_slots, slots_TK)
        order = SlotOrder.of(key_TK, num_slots)
        index_R = order.index_R[:num_rows]
        row_map, counts_L = order.row_map(num_rows, bounded), order.counts_L()
    if num_rows is not None:
        counts_L = _within(counts_L, num_rows, bounded)
    weights_R: Tensor = _Pick.apply(weights_TK, index_R, row_map.row_TK)
    return Trip(row_map, weights_R, counts_L)


def _within(counts_L: Tensor, num_rows: int, bounded: bool) -> Tensor:
    """Return counts that sum to ``num_rows``, whatever the choices are; if ``bounded``, to at most that.

    Choices that came from another host may differ from its announcement. Kernels trust the
    counts, and would read beyond the rows."""
    ends_L = counts_L.cumsum(0).clamp(max=num_rows)
    if not bounded:
        ends_L[-1:] = num_rows
    return torch.diff(ends_L, prepend=ends_L.new_zeros(1))


def every_choice(num_tokens: int, top_k: int, device: torch.device) -> RowMap:
    """Return the map of rows that hold one choice of a token each, in the order of tokens and choices."""
    row_TK = torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k)
    return RowMap(row_TK.flatten() // top_k, row_TK, complete=True)


def key_dtype(num_slots: int) -> torch.dtype:
    """Return the shortest type that holds all slots and the key of absent choices, ``num_slots``.

    A GPU sorts byte by byte, so a short key saves time."""
    if num_slots < 2**8:
        return torch.uint8
    return torch.int16 if num_slots < 2**15 else torch.int64


def copy_rows(x_TD: Tensor, row_map: RowMap) -> Tensor:
    """Copy tokens to rows. Backward: the sum of the rows' gradients."""
    token_R, row_TK = row_map.token_R, row_map.row_TK
    if launching.available(x_TD):
        return fused.gather_rows(x_TD, token_R, row_TK)
    result: Tensor = _CopyRows.apply(x_TD, token_R, row_TK, row_map.complete)
    return result


def sum_rows(rows_RD: Tensor, row_map: RowMap) -> Tensor:
    """Sum the rows of each token. Backward: copies of the token's gradient."""
    token_R, row_TK = row_map.token_R, row_map.row_TK
    if launching.available(rows_RD):
        return fused.sum_rows(rows_RD, row_TK, token_R)
    result: Tensor = _SumRows.apply(rows_RD, token_R, row_TK, row_map.complete)
    return result


def sum_in_order(rows_RD: Tensor, row_map: RowMap) -> Tensor:
    """Return the sum of each token's rows, in their order.

    Not differentiable: for forward and backward functions."""
    row_TK = row_map.row_TK
    if launching.available(rows_RD):
        return fused.sum_rows(rows_RD, row_TK, row_map.token_R)
    # index_add_ on a CPU adds rows one after another, in their order. Short types would be rounded
    # after each row.
    if rows_RD.device.type == "cpu" and rows_RD.dtype in (torch.float32, torch.float64):
        sum_TD = rows_RD.new_zeros(len(row_TK), rows_RD.shape[1])
        return sum_TD.index_add_(0, row_map.token_R, rows_RD)
    return _sum_columns(rows_RD, row_map)


def _sum_columns(rows_RD: Tensor, row_map: RowMap) -> Tensor:
    """Sum one row of each token at a time, so that memory does not grow with their number."""
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    sum_TD = rows_RD.new_zeros(len(row_map.row_TK), rows_RD.shape[1], dtype=dtype)
    if not len(rows_RD):
        return sum_TD.to(rows_RD.dtype)
    for row_T in row_map.row_TK.unbind(1):
        picked_TD = rows_RD.index_select(0, row_T.clamp(min=0))
        if not row_map.complete:
            picked_TD.masked_fill_((row_T < 0).unsqueeze(1), 0.0)
        sum_TD += picked_TD
    return sum_TD.to(rows_RD.dtype)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_R: Tensor,
        row_TK: Tensor,
        complete: bool,
    ) -> Tensor:
        ctx.save_for_backward(token_R, row_TK)
        ctx.complete = complete
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        token_R, row_TK = ctx.saved_tensors
        return sum_in_order(grads[0], RowMap(token_R, row_TK, ctx.complete)), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        token_R: Tensor,
        row_TK: Tensor,
        complete: bool,
    ) -> Tensor:
        ctx.save_for_backward(token_R)
        return sum_in_order(rows_RD, RowMap(token_R, row_TK, complete))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (token_R,) = ctx.saved_tensors
        return grads[0].index_select(0, token_R), None, None, None


class _Pick(torch.autograd.Function):
    """Picks the weights of rows. The backward pass looks up the row of each choice."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, index_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return weights_TK.reshape(-1).index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        (grad_R,) = grads
        if not len(grad_R):
            return grad_R.new_zeros(row_TK.shape), None, None
        picked_TK = grad_R[row_TK.clamp(min=0)]
        return picked_TK.masked_fill(row_TK < 0, 0.0), None, None
