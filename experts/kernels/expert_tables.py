"""Rows, size classes and tables of the function that computes whole experts.

How many rows a size class has is known to the device alone. See ``experts.types`` for the letters of
shapes; a product has inner size K and outer size N."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels.grouped import MAX_GROUPS
from experts.kernels.launching import Span
from experts.kernels.row_products import RowTiles, weight_gradient


class Rows(NamedTuple):
    """The rows of the experts, as both passes need them.

    Operators of torch take no such type, so it is passed as a list of tensors."""

    weights_R: Tensor
    counts_L: Tensor
    row_TK: Tensor


def divided(rows_and_matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of ``Rows``, and the matrices."""
    num_rows_tensors = len(Rows._fields)
    return list(rows_and_matrices[:num_rows_tensors]), list(rows_and_matrices[num_rows_tensors:])


@dataclass(frozen=True)
class TiledClass:
    """A size class: its matrices and the tiles of its rows."""

    up_EDH: Tensor
    down_EHD: Tensor
    tiles: RowTiles

    @property
    def span(self) -> Span:
        """The rows of the class."""
        return Span(self.tiles.begins_E[:1], self.tiles.ends_E[-1:])


def tiled_classes(matrices: Sequence[Tensor], counts_L: Tensor, num_rows: int) -> list[TiledClass]:
    pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
    bounds = accumulate((len(up_EDH) for up_EDH, _ in pairs), initial=0)
    slots = [slice(*bound) for bound in pairwise(bounds)]
    return [
        TiledClass(up_EDH, down_EHD, RowTiles.of(counts_L, num_rows, part))
        for (up_EDH, down_EHD), part in zip(pairs, slots, strict=True)
    ]


def tables(buffer: Tensor, num_rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Return a table of rows for each class, all in one buffer of ``num_rows`` rows of the widest.

    A class uses only its own rows of its table. Tables overlap, but the rows in use do not: row r begins at
    r times the width of its table, and wider classes have higher rows."""
    return [buffer[: num_rows * width].view(num_rows, width) for width in widths]


def new_tables(like: Tensor, num_rows: int, widths: Sequence[int]) -> list[Tensor]:
    return tables(like.new_empty(num_rows * max(widths)), num_rows, widths)


def weight_gradients(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], classes: Sequence[TiledClass]
) -> list[Tensor]:
    """Return the gradient of one matrix of each class."""
    products = [_first_rows_product, *[weight_gradient] * (len(classes) - 1)]
    return [
        product(left_RK, right_RN, each.tiles)
        for product, left_RK, right_RN, each in zip(products, lefts, rights, classes, strict=True)
    ]


def _first_rows_product(left_RK: Tensor, right_RN: Tensor, tiles: RowTiles) -> Tensor:
    """Compute ``weight_gradient`` for experts that have the first rows, by torch's faster operator."""
    if len(tiles.ends_E) > MAX_GROUPS:
        return weight_gradient(left_RK, right_RN, tiles)
    return F.grouped_mm(left_RK.t(), right_RN, offs=tiles.ends_E)


_SECOND_PASS = (
    "a second backward pass through the same experts: the first one wrote gradients over their hidden rows; "
    "compute the forward pass again, or set --expert-kernel loop and, where it is fp8, --precision bf16"
)


def refuse_second_pass(ctx: Any) -> None:
    """Raise before torch does: its error about a changed tensor would not name the reason."""
    if torch.compiler.is_compiling():  # a compiler refuses a second pass itself
        return
    if getattr(ctx, "is_used", False):
        raise RuntimeError(_SECOND_PASS)
    ctx.is_used = True


def mark_overwritten(hidden: Tensor) -> None:
    """Mark hidden rows as overwritten by a backward pass.

    The operator does not declare this mutation, because a compiler would then copy the rows first. Only the
    forward pass of the same function holds them, unless a compiler merges two equal passes."""
    if hidden._version:
        raise RuntimeError(_SECOND_PASS)
    torch.autograd.graph.increment_version(hidden)


def widest(matrices: Sequence[Tensor]) -> int:
    """Return the width of the widest hidden rows."""
    return max(up_EDH.shape[2] for up_EDH in matrices[::2])
