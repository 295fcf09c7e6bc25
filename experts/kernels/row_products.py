"""Products of sorted rows with the matrices of their experts, by a Triton kernel of our own.

The tiles of all experts are computed by as many programs as the GPU has processors. A list on the
device tells each tile's expert and rows, so that the host never waits. Rows are read from a sorted
tensor, or gathered from tokens while they are multiplied: then no copy of them exists. Each element
is summed by one program in a fixed order. See ``experts.types`` for the letters of shapes; a product
has inner size K and outer size N."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.kernels.launching import compiled, num_blocks

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

_ALL = slice(None)
SIZE_MULTIPLE = 64
"""The inner and the outer size of a matrix must be multiples of this: the kernel reads whole blocks."""
_DTYPES = (torch.bfloat16, torch.float16)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel works: it needs the tensor memory accelerator, and 192 KiB of shared memory.

    Hopper and the data-center GPUs of Blackwell have both, others half of that memory. GPUs of AMD, which
    have neither, count their generations by the same numbers."""
    if device.type != "cuda" or dtype not in _DTYPES or torch.version.hip is not None:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major in (9, 10)


@dataclass(frozen=True)
class RowTiles:
    """The tiles of rows of all experts, on the device."""

    height: int
    """Rows of a tile; the last one of an expert may have fewer."""
    expert_J: Tensor
    first_row_J: Tensor
    count_1: Tensor
    """The number of tiles."""
    begins_E: Tensor
    """Where the rows of each expert begin."""
    ends_E: Tensor
    """Where the rows of each expert end."""

    @classmethod
    def of(cls, counts_L: Tensor, num_rows: int, slots: slice = _ALL) -> RowTiles:
        """List the tiles of the experts in some slots; all slots have these numbers of rows.

        Rows after the last slot's are left out. Larger counts are bounded: nothing outside the rows is
        read."""
        first, stop, _ = slots.indices(len(counts_L))
        num_experts = stop - first
        # Low tiles where experts have few rows: most of a high one would be empty.
        height = 64 if num_rows <= 64 * len(counts_L) else 128
        # The device alone knows the number of tiles. At most one tile of each expert is not full.
        capacity = num_blocks(num_rows, height) + num_experts
        expert_J, first_row_J = counts_L.new_empty(2, capacity, dtype=torch.int32).unbind()
        count_1 = counts_L.new_empty(1, dtype=torch.int32)
        begins_E, ends_E = counts_L.new_empty(2, num_experts, dtype=torch.int32).unbind()
        outputs = (expert_J, first_row_J, count_1, begins_E, ends_E)
        sizes = {"L": len(counts_L), "FIRST": first, "E": num_experts}
        block = 1 << (len(counts_L) - 1).bit_length()
        with torch.cuda.device_of(counts_L):
            compiled(_tiles_kernel)[(num_experts,)](
                counts_L, *outputs, num_rows, **sizes, HEIGHT=height, BLOCK=block, num_warps=1
            )
        return cls(height, *outputs)


def row_product(
    rows_RK: Tensor,
    weights_EKN: Tensor,
    tiles: RowTiles,
    token_R: Tensor | None = None,
    result_RN: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    ``weights_EKN`` may be the transpose of a contiguous tensor. With ``token_R``, row r is
    ``rows_RK[token_R[r]]``. Only the rows of these experts are written, into ``result_RN`` if it is
    given. It equals ``grouped_product``."""
    num_rows = len(rows_RK if token_R is None else token_R)
    outer = weights_EKN.shape[2]
    transposed = weights_EKN.stride(2) != 1
    if result_RN is None:
        result_RN = rows_RK.new_empty(num_rows, outer)
    operands = Operands(rows_RK, weights_EKN.transpose(1, 2) if transposed else weights_EKN, transposed)
    launch_product(operands, tiles, result_RN, token_R, SIZE_MULTIPLE, 4 if token_R is None else 3)
    return result_RN


@dataclass(frozen=True)
class Operands:
    """Rows and the matrices of experts, contiguous: ENK if ``transposed``, else EKN.

    With scales, row r of the product is multiplied by the scale of its row or token, and column n of
    expert e by its own."""

    rows_RK: Tensor
    matrices: Tensor
    transposed: bool
    row_scales: Tensor | None = None
    column_scales_EN: Tensor | None = None


def launch_product(
    operands: Operands,
    tiles: RowTiles,
    result_RN: Tensor,
    token_R: Tensor | None,
    inner_block: int,
    stages: int,
) -> None:
    """Multiply the rows of each expert by its matrix, as ``row_product`` does."""
    rows_RK, matrices = operands.rows_RK, operands.matrices
    inner, outer = rows_RK.shape[1], result_RN.shape[1]
    # Fastest of six tiles on an H200: 590 to 710 TFLOP/s, where torch's grouped product has 500 to 620.
    columns = min(256, 1 << (outer - 1).bit_length())
    matrix_block = [columns, inner_block] if operands.transposed else [inner_block, columns]
    programs = _num_processors(rows_RK.device.index)
    with torch.cuda.device_of(rows_RK):
        compiled(_product_kernel)[(programs,)](
            rows_RK if token_R is not None else _descriptor(rows_RK, [tiles.height, inner_block]),
            _descriptor(matrices.reshape(-1, matrices.shape[2]), matrix_block),
            result_RN,
            operands.row_scales,
            operands.column_scales_EN,
            tiles.count_1 if token_R is None else token_R,
            tiles.expert_J,
            tiles.first_row_J,
            tiles.count_1,
            tiles.ends_E,
            outer,
            K=inner,
            TRANSPOSED=operands.transposed,
            GATHER=token_R is not None,
            SCALED=operands.row_scales is not None,
            PROGRAMS=programs,
            BM=tiles.height,
            BN=columns,
            BK=inner_block,
            num_warps=8 if tiles.height * columns > 128 * 128 else 4,
            num_stages=stages,
        )


def weight_gradient(left_RK: Tensor, right_RN: Tensor, tiles: RowTiles) -> Tensor:
    """Return ``left.t() @ right`` of the rows of each expert.

    It equals ``F.grouped_mm(left_RK.t(), right_RN, offs=tiles.ends_E)`` for experts whose rows begin with
    the first one, which that operator needs."""
    num_experts = len(tiles.ends_E)
    inner, outer = left_RK.shape[1], right_RN.shape[1]
    result_EKN = left_RK.new_empty(num_experts, inner, outer)
    blocks = {"BM": 128, "BN": 128, "BR": 64}
    grid = (num_blocks(inner, blocks["BM"]) * num_blocks(outer, blocks["BN"]), num_experts)
    with torch.cuda.device_of(left_RK):
        compiled(_weight_gradient_kernel)[grid](
            left_RK,
            right_RN,
            result_EKN,
            tiles.begins_E,
            tiles.ends_E,
            K=inner,
            N=outer,
            **blocks,
            num_warps=8,
            num_stages=3,
        )
    return result_EKN


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Describe a matrix whose blocks are copied by the tensor memory accelerator."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiles_kernel(
    counts,
    expert_of,
    first_row,
    count,
    begins,
    ends,
    rows,
    L: tl.constexpr,
    FIRST: tl.constexpr,
    E: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program lists the tiles of one expert.

    It reads the counts of all slots, to find where the rows and the tiles of its expert begin: programs need
    not wait for each other."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    is_own = index == FIRST + expert
    size = tl.load(counts + index, mask=index < L, other=0)
    total = tl.cumsum(size, axis=0)
    # Bounded by the number of rows, whatever the counts are.
    begin = tl.minimum(total - size, rows).to(tl.int32)
    end = tl.minimum(total, rows).to(tl.int32)
    is_listed = (index >= FIRST) & (index < FIRST + E)
    tiles = tl.where(is_listed, (end - begin + HEIGHT - 1) // HEIGHT, 0)
    tiles_before = tl.sum(tl.where(index < FIRST + expert, tiles, 0))
    # A sum over a mask reads one element of a block.
    own_tiles = tl.sum(tl.where(is_own, tiles, 0))
    own_begin = tl.sum(tl.where(is_own, begin, 0))
    for number in range(own_tiles):
        tl.store(expert_of + tiles_before + number, expert)
        tl.store(first_row + tiles_before + number, own_begin + number * HEIGHT)
    tl.store(begins + expert, own_begin)
    tl.store(ends + expert, tl.sum(tl.where(is_own, end, 0)))
    if expert == 0:
        tl.store(count, tl.sum(tiles))


def _product_kernel(
    rows,
    matrices,
    out,
    row_scales,
    column_scales,
    token_of,
    expert_of,
    first_row,
    count,
    ends,
    N,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """Each program computes every ``PROGRAMS``-th tile of the result, until there are no more.

    A tile is ``BM`` rows of one expert by ``BN`` columns of its matrix."""
    GROUP: tl.constexpr = 8  # tiles of rows that pass over the same columns, which stay in the cache
    num_tiles = tl.load(count)
    num_columns = tl.cdiv(N, BN)
    per_group = GROUP * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles * num_columns, PROGRAMS, flatten=not GATHER):
        # Within a group, tiles of rows come first and columns second. The last group may have fewer rows.
        first_of_group = (tile // per_group) * GROUP
        group_size = tl.minimum(num_tiles - first_of_group, GROUP)
        row_tile = first_of_group + (tile % per_group) % group_size
        column_tile = (tile % per_group) // group_size
        expert = tl.load(expert_of + row_tile)
        begin = tl.load(first_row + row_tile)
        row = begin + tl.arange(0, BM)
        inside = row < tl.load(ends + expert)
        token = row
        if GATHER:
            token = tl.load(token_of + row, mask=inside, other=0)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            if GATHER:
                # Places after the expert's last row read token 0, so that no mask is needed.
                place = token.to(tl.int64)[:, None] * K + k + tl.arange(0, BK)[None, :]
                left = tl.load(rows + place)
            else:
                # Rows of the next expert may be among them: their products are not stored.
                left = rows.load([begin, k])
            # The matrices of all experts lie below each other in one descriptor.
            if TRANSPOSED:
                right = matrices.load([expert * N + column_tile * BN, k]).T
            else:
                right = matrices.load([expert * K + k, column_tile * BN])
            total = tl.dot(left, right, total)
        column = column_tile * BN + tl.arange(0, BN)
        # Scales are constant along K, so they multiply the sum once.
        if SCALED:
            row_scale = tl.load(row_scales + token, mask=inside, other=0.0)
            column_scale = tl.load(column_scales + expert * N + column, mask=column < N, other=0.0)
            total = total * row_scale[:, None] * column_scale[None, :]
        place = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


def _weight_gradient_kernel(
    left,
    right,
    out,
    begins,
    ends,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
) -> None:
    """Each program computes one block of one expert's matrix, over all rows of the expert.

    No two programs add to one element. An expert without rows gets zeros."""
    expert = tl.program_id(1)
    num_columns = tl.cdiv(N, BN)
    inner = (tl.program_id(0) // num_columns) * BM + tl.arange(0, BM)
    outer = (tl.program_id(0) % num_columns) * BN + tl.arange(0, BN)
    end = tl.load(ends + expert)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for begin in range(tl.load(begins + expert), end, BR):
        row = begin + tl.arange(0, BR)
        inside = (row < end)[:, None]
        place = row.to(tl.int64)[:, None]
        left_block = tl.load(left + place * K + inner[None, :], mask=inside & (inner < K)[None, :], other=0.0)
        right_block = tl.load(
            right + place * N + outer[None, :], mask=inside & (outer < N)[None, :], other=0.0
        )
        total = tl.dot(left_block.T, right_block, total)
    place = expert.to(tl.int64) * K * N + inner[:, None] * N + outer[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(inner < K)[:, None] & (outer < N)[None, :])
