"""Out to the experts of this host and back: ``dispatch`` sorts rows by expert and leaves a Trip, ``combine`` needs that Trip
and nothing else. In both directions, forward and backward, sums run in a fixed order, and no row can be lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.kernels import fused
from experts.types import RowMap, Trip


def dispatch(
    x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, slots: int, rows: int | None = None
) -> tuple[Tensor, Trip]:
    """Rows for the experts, sorted by slot and, within one, by token. ``slots_TK`` is -1 for a choice that is not for this
    host; ``rows`` counts the others, None when there are only others."""
    trip = sorted_by_slot(slots_TK, weights_TK, slots, rows)
    return spread(x_TD, trip.fan), trip


def sorted_by_slot(slots_TK: Tensor, weights_TK: Tensor, slots: int, rows: int | None) -> Trip:
    chosen_R = slots_TK.flatten()
    key_R = chosen_R if rows is None else torch.where(chosen_R < 0, slots, chosen_R)
    key_R, order_R = key_R.to(_key_type(slots)).sort(stable=True)
    ids_S = torch.arange(slots, device=key_R.device).to(key_R.dtype)
    ends_S = torch.searchsorted(key_R, ids_S, right=True)
    counts_S = torch.diff(ends_S, prepend=ends_S.new_zeros(1))
    if rows is not None:
        order_R = order_R[:rows]
    back_R = torch.full_like(chosen_R, -1).scatter_(
        0, order_R, torch.arange(len(order_R), device=order_R.device)
    )
    fan = RowMap(order_R // slots_TK.shape[1], back_R.view_as(slots_TK), full=rows is None)
    weights_R: Tensor = _Pick.apply(weights_TK.reshape(-1), order_R)  # pyright: ignore[reportAssignmentType]
    return Trip(fan, weights_R, counts_S)


def _key_type(slots: int) -> torch.dtype:
    """The shortest that holds all slots and one more: a GPU sorts by bytes, and takes as long as there are bytes."""
    return torch.uint8 if slots < 2**8 else torch.int16 if slots < 2**15 else torch.int64


def combine(rows_RD: Tensor, trip: Trip) -> Tensor:
    """The sum of what the experts made of each token, in the order of its choices. The weights are in it already."""
    return collect(rows_RD, trip.fan)


def spread(x_TD: Tensor, fan: RowMap) -> Tensor:
    """Copies of rows, as the fan says; in the backward pass their gradients are summed."""
    if fused.available(x_TD):
        return fused.gather_rows(x_TD, fan.source_R, fan.back_TK)
    result: Tensor = _Spread.apply(x_TD, fan.source_R, fan.back_TK, fan.full)  # pyright: ignore[reportAssignmentType]
    return result


def collect(rows_RD: Tensor, fan: RowMap) -> Tensor:
    """The sum of each row's copies; in the backward pass its gradient is spread."""
    if fused.available(rows_RD):
        return fused.sum_rows(rows_RD, fan.back_TK, fan.source_R)
    result: Tensor = _Collect.apply(rows_RD, fan.source_R, fan.back_TK, fan.full)  # pyright: ignore[reportAssignmentType]
    return result


def summed(rows_RD: Tensor, source_R: Tensor, back_TK: Tensor, full: bool) -> Tensor:
    """For each token the sum of its rows. On a CPU they are added one after another, in their order; elsewhere gathered and
    summed over K, those named -1 left out (``full``: there are none)."""
    tokens, top_k = back_TK.shape
    if rows_RD.device.type == "cpu" and rows_RD.dtype in (torch.float32, torch.float64):
        return rows_RD.new_zeros(tokens, rows_RD.shape[1]).index_add_(0, source_R, rows_RD)
    if not full:  # a row of zeros for those that are not there
        rows_RD = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])
    index_R = back_TK.reshape(-1) if full else (back_TK % len(rows_RD)).reshape(-1)
    picked = rows_RD.index_select(0, index_R)
    return picked if top_k == 1 else picked.view(tokens, top_k, rows_RD.shape[1]).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, back_TK: Tensor, full: bool) -> Tensor:
        ctx.save_for_backward(source_R, back_TK)
        ctx.full = full
        return x_TD.index_select(0, source_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        source_R, back_TK = ctx.saved_tensors
        return summed(grads[0], source_R, back_TK, ctx.full), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, source_R: Tensor, back_TK: Tensor, full: bool) -> Tensor:
        ctx.save_for_backward(source_R)
        return summed(rows_RD, source_R, back_TK, full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (source_R,) = ctx.saved_tensors
        return grads[0].index_select(0, source_R), None, None, None


class _Pick(torch.autograd.Function):
    """Some entries of a vector, each at most once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.size = values.shape
        return values.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size).index_copy_(0, order_R, grads[0]), None
