"""Packed matrices of several experts, unpacked on a GPU by one kernel.

The numbers are those of ``PackedForm.unpack`` to the bit: the same two products and one sum in fp32, rounded
once. See ``experts.kernels.packed`` for the layout of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experts.kernels.launching import compiled, num_blocks
from experts.kernels.packed import BLOCK, GROUP, PackedForm, scale_values, unit_values

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

_BLOCKS = 64
"""Blocks of numbers that one program unpacks."""


@torch.no_grad()
def unpacked_stack(packed_EB: Tensor, form: PackedForm, dtype: torch.dtype) -> Tensor:
    """Return the matrices of rows of bytes, each outer by inner size."""
    matrices_ENK = torch.empty((len(packed_EB), *form.shape), dtype=dtype, device=packed_EB.device)
    layout = form.layout
    if not layout.numel or not len(packed_EB):
        return matrices_ENK
    packed_EB = packed_EB.contiguous()
    floats, scale_bytes, _ = layout.sections
    grid = (num_blocks(layout.blocks, _BLOCKS), form.parts, len(packed_EB))
    with torch.cuda.device_of(packed_EB):
        compiled(_unpack_kernel)[grid](
            packed_EB,
            packed_EB.view(torch.float32),
            unit_values(form.packing, packed_EB.device),
            scale_values(packed_EB.device),
            matrices_ENK,
            numel=layout.numel,
            blocks=layout.blocks,
            stride=form.num_bytes,
            part_bytes=layout.num_bytes,
            scales_at=floats,
            codes_at=floats + scale_bytes,
            NF4=form.packing == "nf4",
            BLOCKS=_BLOCKS,
            SIZE=BLOCK,
            GROUP=GROUP,
            num_warps=4,
            # A fused product and sum would round once where torch rounds twice.
            enable_fp_fusion=False,
        )
    return matrices_ENK


def _unpack_kernel(
    packed,
    floats,
    units,
    table,
    out,
    numel,
    blocks,
    stride,
    part_bytes,
    scales_at,
    codes_at,
    NF4: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Each program unpacks some blocks of one part of a matrix."""
    part = tl.program_id(1)
    begin = tl.program_id(2).to(tl.int64) * stride + part * part_bytes
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < blocks
    code = tl.load(packed + begin + scales_at + block, mask=exists, other=0).to(tl.int32)
    mean = tl.load(floats + begin // 4)
    of_group = tl.load(floats + begin // 4 + 1 + block // GROUP, mask=exists, other=0.0)
    scale = tl.load(table + code) * of_group + mean
    to = out + (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + part) * numel
    if NF4:
        # The high half of a byte comes first.
        byte = block[:, None].to(tl.int64) * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        pair = tl.load(packed + begin + codes_at + byte, mask=byte * 2 < numel, other=0).to(tl.int32)
        high = tl.load(units + (pair >> 4)) * scale[:, None]
        low = tl.load(units + (pair & 15)) * scale[:, None]
        number = block[:, None].to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
        value = tl.interleave(high, low)
    else:
        number = block[:, None].to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
        byte = tl.load(packed + begin + codes_at + number, mask=number < numel, other=0).to(tl.int32)
        value = tl.load(units + byte) * scale[:, None]
    tl.store(to + number, value.to(out.dtype.element_ty), mask=number < numel)
