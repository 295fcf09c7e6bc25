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

from experts.kernels.fused import compiled, num_blocks

if TYPE_CHECKING:
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    tl = None  # until the first launch

SIZE_MULTIPLE = 64
"""The inner and the outer size of a matrix must be multiples of this: a tile never leaves its matrix."""
_DTYPES = (torch.bfloat16, torch.float16)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel works: it needs the tensor memory accelerator, and 192 KiB of shared memory.

    Hopper and the data-center GPUs of Blackwell have both, others half of that memory."""
    if device.type != "cuda" or dtype not in _DTYPES:
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
    ends_E: Tensor
    """Where the rows of each expert end."""

    @classmethod
    def of(cls, counts_E: Tensor, num_rows: int) -> RowTiles:
        """List the tiles of experts with these numbers of rows.

        Counts that do not add up to ``num_rows`` are bounded: nothing outside the rows is read."""
        num_experts = len(counts_E)
        height = 64 if num_rows <= 64 * num_experts else 128
        capacity = num_blocks(num_rows, height) + num_experts
        expert_J, first_row_J = counts_E.new_empty(2, capacity, dtype=torch.int32).unbind()
        count_1 = counts_E.new_empty(1, dtype=torch.int32)
        ends_E = counts_E.new_empty(num_experts, dtype=torch.int32)
        outputs = (expert_J, first_row_J, count_1, ends_E)
        block = 1 << (num_experts - 1).bit_length()
        with torch.cuda.device_of(counts_E):
            compiled(_tiles_kernel)[(num_experts,)](
                counts_E, *outputs, num_rows, E=num_experts, HEIGHT=height, BLOCK=block, num_warps=1
            )
        return cls(height, *outputs)


def row_product(
    rows_RK: Tensor, weights_EKN: Tensor, tiles: RowTiles, token_R: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    ``weights_EKN`` may be the transpose of a contiguous tensor. With ``token_R``, row r is
    ``rows_RK[token_R[r]]``. It equals ``grouped_product``."""
    num_rows = len(rows_RK if token_R is None else token_R)
    _, inner, outer = weights_EKN.shape
    transposed = weights_EKN.stride(2) != 1
    result_RN = rows_RK.new_empty(num_rows, outer)
    columns = min(256, 1 << (outer - 1).bit_length())
    # Fastest of six tiles on an H200: 590 to 710 TFLOP/s, where torch's grouped product has 500 to 620.
    blocks = {"BM": tiles.height, "BN": columns, "BK": SIZE_MULTIPLE}
    matrices = weights_EKN.transpose(1, 2) if transposed else weights_EKN
    matrix_block = [columns, SIZE_MULTIPLE] if transposed else [SIZE_MULTIPLE, columns]
    rows = rows_RK if token_R is not None else _descriptor(rows_RK, [tiles.height, SIZE_MULTIPLE])
    programs = _num_processors(rows_RK.device.index)
    with torch.cuda.device_of(rows_RK):
        compiled(_product_kernel)[(programs,)](
            rows,
            _descriptor(matrices.reshape(-1, matrices.shape[2]), matrix_block),
            result_RN,
            tiles.count_1 if token_R is None else token_R,
            tiles.expert_J,
            tiles.first_row_J,
            tiles.count_1,
            tiles.ends_E,
            outer,
            K=inner,
            TRANSPOSED=transposed,
            GATHER=token_R is not None,
            PROGRAMS=programs,
            **blocks,
            num_warps=8 if tiles.height * columns > 128 * 128 else 4,
            num_stages=4 if token_R is None else 3,
        )
    return result_RN


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Describe a matrix whose blocks are copied by the tensor memory accelerator."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

    return TensorDescriptor.from_tensor(matrix, block)


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiles_kernel(
    counts,
    expert_of,
    first_row,
    count,
    ends,
    rows,
    E: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program lists the tiles of one expert."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    size = tl.load(counts + index, mask=index < E, other=0)
    total = tl.cumsum(size, axis=0)
    begin = tl.minimum(total - size, rows).to(tl.int32)
    end = tl.where(index >= E - 1, rows, tl.minimum(total, rows)).to(tl.int32)
    tiles = tl.where(index < E, (end - begin + HEIGHT - 1) // HEIGHT, 0)
    tiles_before = tl.sum(tl.where(index < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(index == expert, tiles, 0))
    own_begin = tl.sum(tl.where(index == expert, begin, 0))
    for number in range(own_tiles):
        tl.store(expert_of + tiles_before + number, expert)
        tl.store(first_row + tiles_before + number, own_begin + number * HEIGHT)
    tl.store(ends + expert, tl.sum(tl.where(index == expert, end, 0)))
    if expert == 0:
        tl.store(count, tl.sum(tiles))


def _product_kernel(
    rows,
    matrices,
    out,
    token_of,
    expert_of,
    first_row,
    count,
    ends,
    N,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = 8  # tiles of rows that pass over the same columns, which stay in the cache
    num_tiles = tl.load(count)
    num_columns = tl.cdiv(N, BN)
    per_group = GROUP * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles * num_columns, PROGRAMS, flatten=not GATHER):
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
                place = token.to(tl.int64)[:, None] * K + k + tl.arange(0, BK)[None, :]
                left = tl.load(rows + place)
            else:
                # Rows of the next expert may be among them: their products are not stored.
                left = rows.load([begin, k])
            if TRANSPOSED:
                right = matrices.load([expert * N + column_tile * BN, k]).T
            else:
                right = matrices.load([expert * K + k, column_tile * BN])
            total = tl.dot(left, right, total)
        column = column_tile * BN + tl.arange(0, BN)
        place = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])
