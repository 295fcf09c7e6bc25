"""Sums of gradients that have the same bits in any order, on any number of workers.

Each gradient is rounded to a grid, and the multiples of the grid are added as integers: such sums are exact,
and so do not depend on their order. The grid follows the norm of the step before, which all workers know to
the bit: a gradient keeps 40 bits below the norm, and may outgrow it 256 times. A step that does not fit its
grid is repeated with another one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from experts.kernels.launching import Tile, available, launch, num_blocks

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

_NORM_BITS = 40
"""The norm that is expected is so many bits above one step of the grid."""
_LARGEST_BITS = 48
"""The largest value of one gradient. 15 bits are left for the number of gradients that are added up: the plan
allows 4,096 micro-batches in a step, and a weight may be used eight times in each."""
_COARSE_BITS = 8
"""A norm this many bits below the expected one is too small for the grid."""
_CHUNK = 2**15
"""Elements that a CPU rounds at a time."""
_FIRST_EXPONENT = -_NORM_BITS  # before the first step a norm of 1 is expected
_TILE = Tile(rows=1, columns=2048, warps=8)
_TILES_OF_A_PROGRAM = 8
_SUM_TILE = Tile(rows=1, columns=1024, warps=4)


class ExactSums:
    """The sums of a step's gradients, by parameter, as multiples of a power of two."""

    def __init__(self) -> None:
        self.exponent = _FIRST_EXPONENT
        """One step of the grid is this power of two."""
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._largest: list[Tensor] = []
        self._is_repetition = False

    def begin(self) -> None:
        """Begin an attempt at a step."""
        self._sums = {}
        self._largest = []

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of one use of a parameter in one micro-batch."""
        if not gradient.numel():
            return
        total = self._sums.get(parameter)
        if not (available(gradient) and available(parameter)):
            if total is None:
                self._sums[parameter] = self.to_multiples(gradient)
            else:
                self._round(gradient, total, is_sum=True)
            return
        is_first = total is None
        if total is None:
            total = torch.empty(parameter.shape, dtype=torch.int64, device=parameter.device)
            self._sums[parameter] = total
        self._largest.append(add_to_grid(total, gradient, 2.0**-self.exponent, is_first))

    def to_multiples(self, gradient: Tensor) -> Tensor:
        """Return a gradient as integers on the grid, and remember its largest value."""
        multiples = torch.empty(gradient.shape, dtype=torch.int64, device=gradient.device)
        self._round(gradient, multiples, is_sum=False)
        return multiples

    def _round(self, gradient: Tensor, out: Tensor, is_sum: bool) -> None:
        """Write a gradient as integers on the grid, or add it; remember its largest value."""
        if gradient.dtype == torch.float16:
            gradient = gradient.float()  # torch multiplies in fp16, where a scale of 2**40 is infinite
        self._largest.append(torch.stack(gradient.aminmax()).abs().amax().double().view(1))
        scale = 2.0**-self.exponent
        # In pieces that stay in the cache of a CPU: each operation reads and writes eight bytes an element.
        size = _CHUNK if gradient.device.type == "cpu" else gradient.numel()
        buffer = torch.empty(min(size, gradient.numel()), dtype=torch.float64, device=gradient.device)
        integers = torch.empty_like(buffer, dtype=torch.int64) if is_sum else None
        pieces = zip(gradient.reshape(-1).split(size), out.view(-1).split(size), strict=True)
        for piece, place in pieces:
            rounded = torch.mul(piece, scale, out=buffer[: len(piece)]).round_()
            if integers is None:
                place.copy_(rounded)
            else:
                place += integers[: len(piece)].copy_(rounded)

    def add_multiples(self, parameter: nn.Parameter, multiples: Tensor) -> None:
        """Add integers to the sum of a parameter, or of this worker's shard of it."""
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = multiples
        else:
            total += multiples

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient of the parameter was added."""
        return parameter in self._sums

    def multiples(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum as integers, zeros without a gradient. Writes to it change the sum."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.int64)
        return self._sums[parameter]

    def take(self, parameter: nn.Parameter, by_row: bool) -> tuple[Tensor, Tensor]:
        """Return the sum in the type of the parameter's gradients, and squared norms in fp64; forget it.

        The norms are those of the rows, or one of all. The square of a row depends on the row alone: a sum
        over all rows may take another order for another number of them."""
        multiples = self._sums.pop(parameter).contiguous()
        step = 2.0**self.exponent
        num_rows = len(multiples) if by_row else 1
        # Weights in bf16 have gradients in fp32.
        dtype = parameter.grad_dtype or parameter.dtype
        value = torch.empty(multiples.shape, dtype=dtype, device=multiples.device)
        if not multiples.numel():
            return value, value.new_zeros(num_rows, dtype=torch.float64)
        rows = value.view(num_rows, -1)
        if available(value):
            squares = take_from_grid(multiples, rows, step)
        else:
            value.copy_(multiples.double().mul_(step))
            wide = torch.promote_types(value.dtype, torch.float32)  # a norm in bf16 has three digits
            norms = [torch.linalg.vector_norm(row, dtype=wide).double() for row in rows]
            squares = torch.stack(norms).square()
        # Optimizers want gradients with the strides of their parameters, which a transposed one has not.
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            value = torch.empty_like(parameter, dtype=dtype).copy_(value)
        return value, squares

    def largest(self, device: torch.device) -> Tensor:
        """Return the largest absolute value of all gradients that were added; infinity if one is NaN."""
        if not self._largest:
            return torch.zeros((), dtype=torch.float64, device=device)
        value = torch.cat(self._largest).double().amax()
        return torch.where(value.isfinite(), value, torch.inf)

    def why_repeat(self, largest: float, norm: float) -> str | None:
        """Return why the step must be repeated, with the grid that is set now; None if it need not.

        ``largest`` is that of all workers, ``norm`` that of the sums. Both have the same bits on any number
        of workers, and so the grids of all steps have."""
        repeats = self._is_repetition
        self._is_repetition = False
        if not math.isfinite(largest) or not math.isfinite(norm):
            return None  # there is no grid for it: the step is skipped, or ends the run
        if largest >= 2.0 ** (self.exponent + _LARGEST_BITS):
            self._expect(_exponent_of(largest) - _LARGEST_BITS + 4)
            self._is_repetition = True
            return f"a gradient of {largest:.3g} is too large for the grid of their exact sums"
        if norm == 0 and largest > 0:
            before = self.exponent
            self._expect(min(before, _exponent_of(largest) - _NORM_BITS))
            # On a grid that is fine enough the sum is zero indeed.
            if self.exponent < before:
                return (
                    f"all gradients, of {largest:.3g} at most, are too small for the grid of their exact sums"
                )
        # Once: after gradients that were too large, their sum may be small.
        is_coarse = 0 < norm < 2.0 ** (self.exponent + _NORM_BITS - _COARSE_BITS)
        if norm > 0:
            self._expect(_exponent_of(norm) - _NORM_BITS)
        if is_coarse and not repeats:
            self._is_repetition = True
            return f"a gradient norm of {norm:.3g} is too small for the grid of its exact sum"
        return None

    def _expect(self, exponent: int) -> None:
        # Kernels take powers of two in fp32, which has none beyond these bounds.
        self.exponent = min(126, max(-126, exponent))


def _exponent_of(value: float) -> int:
    """Return the exponent of the power of two at or above a positive number."""
    mantissa, exponent = math.frexp(value)
    return exponent - (mantissa == 0.5)


# --- kernels: each passes once over a gradient, where plain torch takes six passes, with temporaries of eight
# bytes for each element


def add_to_grid(total: Tensor, gradient: Tensor, scale: float, is_first: bool) -> Tensor:
    """Add ``gradient * scale``, rounded, to ``total``. Return the gradient's largest absolute values, one for
    each program.

    With ``is_first`` the total has no value yet. NaN counts as infinity."""
    gradient = gradient.contiguous()
    programs = num_blocks(gradient.numel(), _TILES_OF_A_PROGRAM * _TILE.columns)
    largest = gradient.new_empty(programs, dtype=torch.float32)
    launch(
        _add_kernel,
        _TILE,
        (programs, 1),
        *(total, gradient, largest, gradient.numel(), scale),
        FIRST=is_first,
        TILES=_TILES_OF_A_PROGRAM,
    )
    return largest


def take_from_grid(total: Tensor, value: Tensor, step: float) -> Tensor:
    """Write ``total * step`` into the rows of ``value``. Return the sums of the squares of its rows, in fp64.

    The squares of a row are added in an order that depends on its length alone."""
    rows, length = value.shape
    programs = num_blocks(length, _TILES_OF_A_PROGRAM * _TILE.columns)
    squares = value.new_empty(rows, programs, dtype=torch.float32)
    grid = (programs, rows)
    launch(_take_kernel, _TILE, grid, total, value, squares, length, step, TILES=_TILES_OF_A_PROGRAM)
    sums = value.new_empty(rows, dtype=torch.float64)
    launch(_sum_kernel, _SUM_TILE, (rows, 1), squares, sums, programs)
    return sums


def _add_kernel(
    total,
    gradient,
    largest,
    size,
    scale,
    FIRST: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * TILES * COLUMNS
    most = tl.zeros((COLUMNS,), dtype=tl.float32)
    for tile in range(TILES):
        place = begin + tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = place < size
        value = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        magnitude = tl.where(value == value, tl.abs(value), float("inf"))
        most = tl.maximum(most, magnitude)
        scaled = value.to(tl.float64) * scale
        # Adding and subtracting 1.5 * 2**52 rounds to the nearest whole number.
        multiples = ((scaled + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)
        if not FIRST:
            multiples += tl.load(total + place, mask=inside, other=0)
        tl.store(total + place, multiples, mask=inside)
    tl.store(largest + tl.program_id(0), tl.max(most))


def _take_kernel(
    total,
    value,
    squares,
    length,
    step,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * TILES * COLUMNS
    found = tl.zeros((COLUMNS,), dtype=tl.float32)
    for tile in range(TILES):
        column = begin + tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < length
        place = row * length + column
        multiples = tl.load(total + place, mask=inside, other=0)
        element = (multiples.to(tl.float64) * step).to(tl.float32)
        tl.store(value + place, element, mask=inside)
        found += element * element
    tl.store(squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(found))


def _sum_kernel(
    squares,
    sums,
    length,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros((COLUMNS,), dtype=tl.float64)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        found += tl.load(squares + row * length + column, mask=column < length, other=0.0).to(tl.float64)
    tl.store(sums + row, tl.sum(found))
