"""Frozen matrices in 4 or 8 bits: NF4 with double quantisation (QLoRA), and 8-bit integers.

Numbers are in blocks of 64 with one scale each, the largest size in the block. The scales are in 8 bits too:
less their mean, in groups of 256 with one fp32 scale each, by a table of 256 values. Codes, their order in a
byte and both tables are those of bitsandbytes, so that a matrix of its checkpoints has the same codes here.

A matrix is stored as a linear layer has it, outer × inner size; the first matrix of a SwiGLU expert is two
such, as files have them. A packed part is one row of bytes: fp32 mean and scales of groups, scales of blocks,
codes. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.types import Packing

BLOCK = 64
"""Numbers that share a scale."""
GROUP = 256
"""Scales that share a scale of their own."""
_ALIGNMENT = 16  # bytes of a part are a multiple, so that fp32 numbers of each expert are aligned
_FP32_BYTES = 4
_LARGEST_TAIL = 0.9677083
"""The probability whose quantile becomes 1, of the paper: between 1 - 1/30 and 1 - 1/32."""
_DECADES = 7
_STEPS_8BIT = 127
_PIECE_BLOCKS = 2**16
"""Blocks that are converted at a time: temporary tensors stay small beside large matrices."""


@cache
def nf4_values() -> list[float]:
    """Return the 16 values of NF4, in the order of their codes: quantiles of the normal distribution, scaled
    to -1 … 1. Zero is one of them, and there is one more above it than below."""
    quantile = NormalDist().inv_cdf

    def above_zero(number: int) -> list[float]:
        step = (_LARGEST_TAIL - 0.5) / number
        return [quantile(0.5 + step * (index + 1)) for index in range(number)]

    upper, lower = above_zero(8), above_zero(7)
    largest = max(upper)
    return sorted(value / largest for value in (*upper, 0.0, *(-value for value in lower)))


@cache
def dynamic_values(signed: bool) -> list[float]:
    """Return 256 values between -1 or 0 and 1, in the order of their codes.

    Seven decades: the largest has half of the values, each further one half as many."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        num_values = 2 ** (decade if signed else decade + 1)
        bounds = torch.linspace(0.1, 1, num_values + 1, dtype=torch.float64, device="cpu")
        found = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)).tolist()
        values += [*found, *(-value for value in found)] if signed else found
    return sorted(values)


@dataclass(frozen=True)
class PackedForm:
    """The form of a packed matrix of ``outer`` × ``inner`` numbers, in ``parts`` of as many rows each."""

    packing: Packing
    outer: int
    inner: int
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.outer, self.inner

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed matrix."""
        return self.parts * self.layout.num_bytes

    @property
    def layout(self) -> Layout:
        return Layout(self.packing, self.outer // self.parts * self.inner)

    @torch.no_grad()
    def pack(self, matrix_NK: Tensor) -> Tensor:
        """Return a matrix as bytes; of one without memory, or without values, bytes of the same kind."""
        if matrix_NK.is_meta or isinstance(matrix_NK, FakeTensor):
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=matrix_NK.device)
        if tuple(matrix_NK.shape) != self.shape:
            raise ValueError(f"a matrix has shape {tuple(matrix_NK.shape)}; {self.shape} was needed")
        parts = matrix_NK.chunk(self.parts)
        return torch.cat([_pack_part(part.flatten(), self.layout) for part in parts])

    def assembled(self, mean: Tensor, scale_G: Tensor, scale_codes: Tensor, codes: Tensor) -> Tensor:
        """Return the bytes of a matrix in one part from its sections."""
        floats = torch.cat([mean, scale_G]).view(torch.uint8)
        packed = torch.cat([floats, scale_codes, codes])
        return F.pad(packed, (0, self.num_bytes - len(packed)))

    @torch.no_grad()
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix of bytes. Each number is rounded once, from fp32."""
        if isinstance(packed, FakeTensor):
            return packed.new_empty(self.shape, dtype=dtype)
        matrix = torch.empty(self.shape, dtype=dtype, device=packed.device)
        for part, target in zip(packed.chunk(self.parts), matrix.chunk(self.parts), strict=True):
            _unpack_part(part, self.layout, target.view(-1))
        return matrix


@dataclass(frozen=True)
class Layout:
    """The places of one part's numbers in its bytes."""

    packing: Packing
    numel: int

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)

    @property
    def groups(self) -> int:
        return -(-self.blocks // GROUP)

    @property
    def code_bytes(self) -> int:
        return -(-self.numel // 2) if self.packing == "nf4" else self.numel

    @property
    def sections(self) -> tuple[int, int, int]:
        """Bytes of the mean and the groups' scales, of the blocks' scales, and of the codes."""
        return _FP32_BYTES * (1 + self.groups), self.blocks, self.code_bytes

    @property
    def num_bytes(self) -> int:
        return -(-sum(self.sections) // _ALIGNMENT) * _ALIGNMENT


def _pack_part(values: Tensor, layout: Layout) -> Tensor:
    values_B64 = F.pad(values, (0, layout.blocks * BLOCK - layout.numel)).view(-1, BLOCK)
    scale_B = values_B64.abs().amax(1).float()
    pieces = zip(values_B64.split(_PIECE_BLOCKS), scale_B.split(_PIECE_BLOCKS), strict=True)
    encode = _encode_nf4 if layout.packing == "nf4" else _encode_int8
    codes = torch.cat([encode(piece.float() / _divisor(scale).unsqueeze(1)) for piece, scale in pieces])
    # In fp64 the mean does not depend on the order of its sum, but for one case in millions.
    mean = scale_B.double().mean().float()
    centred_G256 = F.pad(scale_B - mean, (0, -layout.blocks % GROUP)).view(-1, GROUP)
    scale_G = centred_G256.abs().amax(1)
    middles = _table(_middles("dynamic"), values.device)
    scale_codes = torch.bucketize(centred_G256 / _divisor(scale_G).unsqueeze(1), middles, out_int32=True)
    floats = torch.cat([mean.view(1), scale_G]).view(torch.uint8)
    packed = torch.cat([floats, scale_codes.flatten()[: layout.blocks].to(torch.uint8)])
    packed = torch.cat([packed, codes[: layout.code_bytes]])
    return F.pad(packed, (0, layout.num_bytes - len(packed)))


def _unpack_part(packed: Tensor, layout: Layout, target: Tensor) -> None:
    floats, scale_codes, codes = packed[: sum(layout.sections)].split(layout.sections)
    mean, scale_G = floats.clone().view(torch.float32).split([1, layout.groups])
    scales = _table(_values("dynamic"), packed.device).index_select(0, scale_codes.int())
    scale_B = (scales * scale_G.repeat_interleave(GROUP)[: layout.blocks]) + mean
    per_block = BLOCK // 2 if layout.packing == "nf4" else BLOCK
    decode = _decode_nf4 if layout.packing == "nf4" else _decode_int8
    for begin in range(0, layout.blocks, _PIECE_BLOCKS):
        scale = scale_B[begin : begin + _PIECE_BLOCKS]
        values = decode(codes[begin * per_block : (begin + len(scale)) * per_block])
        place = target[begin * BLOCK : (begin + len(scale)) * BLOCK]
        values = F.pad(values, (0, len(scale) * BLOCK - len(values))).view(-1, BLOCK)
        place.copy_((values * scale.unsqueeze(1)).view(-1)[: len(place)])


def unit_values(packing: Packing, device: torch.device) -> Tensor:
    """Return the number of each code, before its scale."""
    return _table(_values("nf4" if packing == "nf4" else "int8"), device)


def scale_values(device: torch.device) -> Tensor:
    """Return the number of each code of a scale."""
    return _table(_values("dynamic"), device)


def nf4_numbers(codes: Tensor, scale_B: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the matrix of NF4 codes whose blocks have scales in fp32."""
    values = _decode_nf4(codes)
    values_B64 = F.pad(values, (0, len(scale_B) * BLOCK - len(values))).view(-1, BLOCK)
    return (values_B64 * scale_B.unsqueeze(1)).view(-1)[: shape[0] * shape[1]].view(shape)


def _encode_nf4(values_B64: Tensor) -> Tensor:
    codes = torch.bucketize(values_B64, _table(_middles("nf4"), values_B64.device), out_int32=True)
    first, second = codes.to(torch.uint8).view(-1, 2).unbind(1)
    return (first << 4) | second


def _decode_nf4(codes: Tensor) -> Tensor:
    return _table(_values("nf4 pairs"), codes.device).view(-1, 2).index_select(0, codes.int()).view(-1)


def _encode_int8(values_B64: Tensor) -> Tensor:
    return (values_B64 * _STEPS_8BIT).round().to(torch.int8).flatten().view(torch.uint8)


def _decode_int8(codes: Tensor) -> Tensor:
    # Not by a division: a GPU multiplies by the reciprocal, which rounds some numbers in another way.
    return _table(_values("int8"), codes.device).index_select(0, codes.int())


def _divisor(scale: Tensor) -> Tensor:
    """Return scales to divide by: 1 for a block of zeros."""
    return torch.where(scale > 0, scale, 1)


@lru_cache
def _values(name: str) -> tuple[float, ...]:
    if name == "dynamic":
        return tuple(dynamic_values(signed=True))
    if name == "int8":
        # By the byte without its sign: the quotients of two fp32 numbers.
        signed = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int8).float() / _STEPS_8BIT
        return tuple(signed.tolist())
    values = nf4_values()
    if name == "nf4":
        return tuple(values)
    # The values of both halves of each byte; the high one comes first.
    return tuple(value for high in values for low in values for value in (high, low))


@lru_cache
def _middles(name: str) -> tuple[float, ...]:
    """Return the middles between neighbouring values: a number is rounded to the value on its side."""
    values = _values(name)
    return tuple((low + high) / 2 for low, high in pairwise(values))


@lru_cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
