"""Out to the experts and back: ``dispatch`` sorts rows by expert and leaves a Trip, ``combine`` needs that Trip and
nothing else. Both directions are gathers, in forward and backward, so sums run in a fixed order and no row can be lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.types import Routing, Trip


def dispatch(x_TD: Tensor, routing: Routing, slot_E: Tensor) -> tuple[Tensor, Trip]:
    """Rows for the experts, sorted by slot and, within one, by token. ``slot_E`` maps an expert's id to its slot."""
    slots_R = slot_E[routing.experts_TK].flatten()
    order_R = torch.argsort(slots_R, stable=True)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    counts_S = torch.zeros_like(routing.counts_E).scatter_(0, slot_E, routing.counts_E)
    rows_RD: Tensor = _Gather.apply(x_TD, order_R, back_R, routing.experts_TK.shape[1])  # pyright: ignore[reportAssignmentType]
    return rows_RD, Trip(order_R, back_R, routing.weights_TK, counts_S)


def combine(rows_RD: Tensor, trip: Trip) -> Tensor:
    """The weighted sum of what the experts made of each token, in the order of its choices."""
    tokens, top_k = trip.weights_TK.shape
    rows_TKD = permute(rows_RD, trip.back_R, trip.order_R).view(tokens, top_k, rows_RD.shape[-1])
    return torch.einsum("tkd,tk->td", rows_TKD, trip.weights_TK.to(rows_RD.dtype))


def permute(rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
    result: Tensor = _Permute.apply(rows_RD, order_R, back_R)  # pyright: ignore[reportAssignmentType]
    return result


class _Gather(torch.autograd.Function):
    """Row r of the result is the token of flat choice ``order[r]``; backward sums a token's choices in order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, back_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.shape = (x_TD.shape[0], top_k, x_TD.shape[1])
        return x_TD[order_R // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (back_R,) = ctx.saved_tensors
        return grads[0][back_R].view(ctx.shape).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; backward is the inverse permutation, a gather too."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back_R,) = ctx.saved_tensors
        return grads[0][back_R], None, None
