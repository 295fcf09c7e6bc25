"""The norm of all gradients.

Large gradients on a GPU are read by a kernel of Triton, at the speed of the memory: torch's kernel for lists
of tensors reached half of it for the 4.8 GB of a model with 2.5 billion parameters on an H200. The others are
left to torch."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experts.kernels.launching import Tile, available, launch, num_blocks

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

LARGE = 2**20
"""Gradients with at least so many elements get a launch of their own."""
_TILE = Tile(rows=1, columns=2048, warps=8)
_TILES_OF_A_PROGRAM = 16


def norm_of_gradients(gradients: list[Tensor]) -> Tensor:
    """Return the norm of gradients taken as one vector, in fp64: each counted once, in a fixed order.

    Squares of short types are summed in fp32 at least."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    large = [gradient for gradient in gradients if _has_kernel(gradient)]
    others = [gradient for gradient in gradients if not _has_kernel(gradient)]
    norms = _norms_by_torch(others)
    if large:
        norms.append(_sums_of_squares(large).double().sum().sqrt())
    return torch.linalg.vector_norm(torch.stack(norms))


def _has_kernel(gradient: Tensor) -> bool:
    return gradient.numel() >= LARGE and gradient.is_contiguous() and available(gradient)


def _norms_by_torch(gradients: list[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, in fp64. Torch computes tensors of one type together."""
    wide = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    norms: dict[int, Tensor] = {}
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        of_type = torch._foreach_norm([gradients[place] for place in places], 2, wide)
        norms |= dict(zip(places, of_type, strict=True))
    return list(torch.stack([norms[place] for place in sorted(norms)]).double()) if norms else []


def _sums_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return sums that add up to that of all squares, in fp32: one for each program."""
    programs = [num_blocks(each.numel(), _TILES_OF_A_PROGRAM * _TILE.columns) for each in gradients]
    sums = gradients[0].new_empty(sum(programs), dtype=torch.float32)
    for gradient, part in zip(gradients, sums.split(programs), strict=True):
        grid = (len(part), 1)
        launch(_squares_kernel, _TILE, grid, gradient, part, gradient.numel(), TILES=_TILES_OF_A_PROGRAM)
    return sums


def _squares_kernel(
    values,
    sums,
    size,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    """Each program sums the squares of some tiles that follow each other."""
    # Places are computed in 64 bits: a gradient may have more than 2**31 elements.
    begin = tl.program_id(0).to(tl.int64) * TILES * COLUMNS
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for tile in range(TILES):
        place = begin + tile * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(values + place, mask=place < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))
