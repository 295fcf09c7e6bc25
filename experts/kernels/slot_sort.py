"""Counting choices by slot, and sorting them: a counting sort in three Triton kernels.

A general sort of as many keys passes over them several times, in a dozen launches, and the inverse of its
order is one more. Slots are few, so counting them is enough: blocks of choices count their slots, the counts
are summed over the blocks, and each choice then knows its row. Nothing depends on the order of programs. See
``experts.types`` for the letters of shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.kernels.launching import available as has_kernels
from experts.kernels.launching import compiled, num_blocks, register

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

_MAX_SLOTS = 1024
_BLOCK = 128  # choices of a program, which compares each with all others
_SCANNED_BLOCKS, _SCANNED_SLOTS = 256, 8
EVERY = -1
"""For ``num_rows``: no choice is absent."""


def available(slots_TK: Tensor, num_slots: int) -> bool:
    """Whether the kernels take these choices."""
    if not (slots_TK.is_cuda and has_kernels()):
        return False
    return 0 < num_slots <= _MAX_SLOTS and 0 < slots_TK.numel() < 2**31


def count_choices(slots_TK: Tensor, num_slots: int) -> Tensor:
    """Return the number of choices of each slot; each choice has one.

    Torch adds ones at their slots, which wait for each other where slots are few."""
    if available(slots_TK, num_slots):
        return _ops.count_choices(slots_TK, num_slots)
    slot_R = slots_TK.flatten()
    zeros_L = torch.zeros(num_slots, dtype=torch.int64, device=slots_TK.device)
    return zeros_L.scatter_add_(0, slot_R, torch.ones_like(slot_R))


def sort_choices(
    slots_TK: Tensor, num_slots: int, num_rows: int = EVERY
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of choices, sorted by slot and within a slot by token.

    They are: the place of each row's choice in the flat (T, K) table, its token, the row of each choice
    (-1 for none) and the number of choices of each slot. A choice without a slot from 0 to ``num_slots`` - 1
    is absent. There are ``num_rows`` rows: choices beyond have none, and rows that no choice fills are those
    of token 0. For present choices alone the first is ``slots_TK.flatten().argsort(stable=True)``."""
    return _ops.sort_choices(slots_TK, num_slots, num_rows)


def _sort_choices(slots_TK: Tensor, num_slots: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots_TK = slots_TK.contiguous()
    size = slots_TK.numel()
    top_k = slots_TK.shape[1]
    counts_BL = _block_counts(slots_TK, num_slots)
    blocks = len(counts_BL)
    count_L = slots_TK.new_empty(num_slots, dtype=torch.int64)
    row_TK = torch.empty_like(slots_TK, dtype=torch.int64)
    # Two tensors, and not the halves of one: results of an operator must not share memory.
    index_R, token_R = (
        row_TK.new_empty(size) if num_rows == EVERY else row_TK.new_zeros(num_rows) for _ in range(2)
    )
    with torch.cuda.device_of(slots_TK):
        compiled(_scan_kernel)[(num_blocks(num_slots, _SCANNED_SLOTS),)](
            counts_BL, count_L, blocks, L=num_slots, ROWS=_SCANNED_BLOCKS, COLUMNS=_SCANNED_SLOTS, num_warps=4
        )
        end_L = count_L.cumsum(0)
        compiled(_place_kernel)[(blocks,)](
            *(slots_TK, counts_BL, count_L, end_L, row_TK, index_R, token_R),
            *(size, len(index_R)),
            L=num_slots,
            K=top_k,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return index_R, token_R, row_TK, count_L


def _count_choices(slots_TK: Tensor, num_slots: int) -> Tensor:
    return _block_counts(slots_TK.contiguous(), num_slots).sum(0)


def _block_counts(slots_TK: Tensor, num_slots: int) -> Tensor:
    """Return the choices of each slot, by blocks of choices."""
    size = slots_TK.numel()
    counts_BL = slots_TK.new_empty(num_blocks(size, _BLOCK), num_slots, dtype=torch.int32)
    padded_slots = 1 << (num_slots - 1).bit_length()
    sizes = {"L": num_slots, "SLOTS": padded_slots, "COLUMNS": min(32, padded_slots)}
    with torch.cuda.device_of(slots_TK):
        compiled(_count_kernel)[(len(counts_BL),)](
            slots_TK, counts_BL, size, **sizes, BLOCK=_BLOCK, num_warps=4
        )
    return counts_BL


def _results(slots_TK: Tensor, num_slots: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tensors like the results of ``_sort_choices``."""
    rows = slots_TK.shape[0] * slots_TK.shape[1] if num_rows == EVERY else num_rows
    index_R, token_R = (slots_TK.new_empty(rows, dtype=torch.int64) for _ in range(2))
    # The rows are contiguous where the slots are not: ``torch.empty_like`` would keep the strides.
    row_TK = slots_TK.new_empty(slots_TK.shape, dtype=torch.int64)
    return index_R, token_R, row_TK, slots_TK.new_empty(num_slots, dtype=torch.int64)


def _count_kernel(
    slots,
    counts,
    size,
    L: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program counts the slots of a block of choices."""
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + place, mask=place < size, other=-1)
    # Some slots at a time: the comparison of all choices with all slots would not fit in registers.
    for first in tl.static_range(0, SLOTS, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        count = tl.sum((slot[:, None] == column[None, :]).to(tl.int32), axis=0)
        tl.store(counts + block * L + column, count, mask=column < L)


def _scan_kernel(
    counts,
    totals,
    blocks,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program replaces the counts of some slots by their sums over the blocks before.

    It is an exclusive prefix sum down each column of the table of blocks and slots."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        inside = (block < blocks)[:, None] & (column < L)[None, :]
        place = counts + block.to(tl.int64)[:, None] * L + column[None, :]
        count = tl.load(place, mask=inside, other=0)
        # cumsum includes the block itself, which is subtracted again.
        tl.store(place, before[None, :] + tl.cumsum(count, axis=0) - count, mask=inside)
        before += tl.sum(count, axis=0)
    tl.store(totals + column, before.to(tl.int64), mask=column < L)


def _place_kernel(
    slots,
    counts,
    totals,
    ends,
    row_of,
    index,
    token,
    size,
    rows,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program finds the rows of a block of choices.

    The row of a choice is the first row of its slot, plus the choices of that slot in earlier blocks, plus
    those before it in its own block."""
    block = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    place = block * BLOCK + number
    in_table = place < size
    slot = tl.load(slots + place, mask=in_table, other=-1)
    present = (slot >= 0) & (slot < L)
    is_earlier = (slot[:, None] == slot[None, :]) & (number[None, :] < number[:, None])
    row = tl.sum(is_earlier.to(tl.int64), axis=1)
    # ``counts`` are the prefix sums of ``_scan_kernel`` by now.
    row += tl.load(counts + block * L + slot, mask=present, other=0)
    row += tl.load(ends + slot, mask=present, other=0) - tl.load(totals + slot, mask=present, other=0)
    has_row = present & (row < rows)
    tl.store(row_of + place, tl.where(has_row, row, -1), mask=in_table)
    tl.store(index + row, place, mask=has_row)
    tl.store(token + row, place // K, mask=has_row)


register(
    "count_choices(Tensor slots_TK, int num_slots) -> Tensor",
    _count_choices,
    lambda slots_TK, num_slots: slots_TK.new_empty(num_slots, dtype=torch.int64),
)
register(
    "sort_choices(Tensor slots_TK, int num_slots, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _sort_choices,
    _results,
)
_ops: Any = torch.ops.experts
