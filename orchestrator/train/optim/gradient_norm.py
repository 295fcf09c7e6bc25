"""The norm of all gradients: fast, or with the same bits for any division into shards.

Large gradients on a GPU are read by a kernel of Triton, at the speed of the memory: torch's kernel for lists
of tensors reached half of it for the 4.8 GB of a model with 2.5 billion parameters on an H200. The others are
left to torch.

For the same bits (``exact_square``) each value becomes an integer of 31 bits relative to the largest of all,
which is the same in any order. Squares of integers have an exact sum, which does not depend on where a shard
begins. Large gradients on a GPU are read twice: for the largest value, and by a kernel for the squares."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experts.hosts.group import Group
from experts.kernels.launching import Tile, available, launch, num_blocks

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

LARGE = 2**20
"""Gradients with at least so many elements get a launch of their own."""
_TILE = Tile(rows=1, columns=2048, warps=8)
_TILES_OF_A_PROGRAM = 16
_BITS = 31
"""Of the largest value. A square has 62 bits: its halves of 31 are added apart, for up to 2**32 values."""
_LOWER_HALF = 2**_BITS - 1
_CHUNK = {"cpu": 2**15, "cuda": 2**24}
"""Elements that plain torch squares at a time: their integers take several times their memory."""


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


@torch.no_grad()
def exact_square(gradients: Sequence[Tensor], device: torch.device, group: Group | None = None) -> Tensor:
    """Return the squared norm of gradients taken as one vector, in fp64.

    With a group ``gradients`` are this worker's shards; all workers have the same list."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    largest = _largest(gradients, device)
    if group is not None:
        group.all_reduce_max(largest).wait()
    # A power of two: the multiplication is exact, and only the rounding to integers is not.
    scale = torch.exp2(_BITS - torch.frexp(largest).exponent.double())
    halves_P2 = torch.stack([_halves(gradient, scale) for gradient in gradients])
    if group is not None:
        group.all_reduce(halves_P2).wait()
    upper_P, lower_P = halves_P2.double().unbind(1)
    square = (upper_P * 2.0**_BITS + lower_P).sum() / scale / scale
    return torch.where(largest.isfinite(), square, torch.nan)


def _largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value, in fp64. NaN becomes infinity: it may get lost in a maximum."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack([norm.double() for norm in torch._foreach_norm(filled, torch.inf)]).amax()
    return torch.nan_to_num(largest, nan=torch.inf, posinf=torch.inf).to(device)


def _halves(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return the sums of the upper and of the lower halves of all squares."""
    if available(gradient) and gradient.is_contiguous() and gradient.numel():
        return _halves_by_kernel(gradient, scale)
    halves_2 = torch.zeros(2, dtype=torch.int64, device=scale.device)
    for chunk in gradient.reshape(-1).split(_CHUNK[gradient.device.type]):
        squares = (chunk.double() * scale).round_().to(torch.int64).square_()
        halves_2[0] += (squares >> _BITS).sum()
        halves_2[1] += (squares & _LOWER_HALF).sum()
    return halves_2


def _halves_by_kernel(gradient: Tensor, scale: Tensor) -> Tensor:
    programs = num_blocks(gradient.numel(), _TILES_OF_A_PROGRAM * _TILE.columns)
    sums_2P = torch.empty(2, programs, dtype=torch.int64, device=gradient.device)
    launch(
        _halves_kernel,
        _TILE,
        (programs, 1),
        *(gradient, scale, sums_2P, gradient.numel(), programs),
        TILES=_TILES_OF_A_PROGRAM,
    )
    return sums_2P.sum(1)


def _halves_kernel(
    values,
    scale,
    sums,
    size,
    programs,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    """Each program adds up the halves of some tiles that follow each other."""
    begin = tl.program_id(0).to(tl.int64) * TILES * COLUMNS
    factor = tl.load(scale)
    upper = tl.zeros((COLUMNS,), dtype=tl.int64)
    lower = tl.zeros((COLUMNS,), dtype=tl.int64)
    for tile in range(TILES):
        place = begin + tile * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(values + place, mask=place < size, other=0.0).to(tl.float64) * factor
        # Adding 1.5 * 2**52 rounds to a whole number, to the even one of two as torch does.
        number = ((value + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)
        square = number * number
        upper += square >> 31
        lower += square & 2147483647
    tl.store(sums + tl.program_id(0), tl.sum(upper))
    tl.store(sums + programs + tl.program_id(0), tl.sum(lower))
