"""Matrices that bitsandbytes has quantised in NF4, as its checkpoints hold them.

A matrix ``w`` is codes under its own name, scales of its blocks in ``w.absmax``, and a JSON text in
``w.quant_state.bitsandbytes__nf4``. With double quantisation the scales are codes themselves, of the table
``w.nested_quant_map``, with scales of their own in ``w.nested_absmax``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from experts.kernels.packed import BLOCK, GROUP, PackedForm, dynamic_values, nf4_numbers, nf4_values
from experts.tensor_format import Entry

_STATE = ".quant_state.bitsandbytes__"
_KIND = "nf4"
_SCALES = ".absmax"
_TABLE = ".quant_map"
_NESTED_SCALES = ".nested_absmax"
_NESTED_TABLE = ".nested_quant_map"
_TABLE_ERROR = 1e-6
_READERS = 8

Read = Callable[[str], Tensor]
"""Returns a tensor of the files by its name, as it is."""


def accepts(method: Mapping[str, object]) -> bool:
    """Whether matrices of a ``quantization_config`` can be read."""
    in_4_bits = method.get("load_in_4bit") or method.get("_load_in_4bit")
    is_nf4 = method.get("bnb_4bit_quant_type") == _KIND
    return method.get("quant_method") == "bitsandbytes" and bool(in_4_bits) and is_nf4


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix of files in NF4."""

    name: str
    shape: tuple[int, int]
    offset: float | None
    """The mean of the scales, less which they are quantised; None for scales in fp32."""
    read: Read

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors that stand beside the codes."""
        nested = () if self.offset is None else (_NESTED_SCALES, _NESTED_TABLE)
        return tuple(f"{self.name}{part}" for part in (_SCALES, _TABLE, *nested, f"{_STATE}{_KIND}"))

    def packed(self) -> Tensor:
        """Read the bytes in the form of ``PackedForm``, which has no scales in fp32: it needs ``offset``."""
        mean = torch.tensor([self.offset], dtype=torch.float32)
        scales = self._part(_SCALES, torch.uint8)
        scale_G = self._part(_NESTED_SCALES, torch.float32)
        self._check_table(_NESTED_TABLE, dynamic_values(signed=True))
        return self._form.assembled(mean, scale_G, scales, self._codes)

    def numbers(self) -> Tensor:
        """Read the matrix in fp32."""
        self._check_table(_TABLE, nf4_values())
        if self.offset is not None:
            return self._form.unpack(self.packed(), torch.float32)
        return nf4_numbers(self._codes, self._part(_SCALES, torch.float32), self.shape)

    @property
    def _form(self) -> PackedForm:
        return PackedForm(_KIND, *self.shape)

    @property
    def _codes(self) -> Tensor:
        # Some are stored under another type, for libraries that divide parameters by their type.
        return self.read(self.name).contiguous().view(torch.uint8).view(-1)

    def _part(self, part: str, dtype: torch.dtype) -> Tensor:
        blocks = -(-prod(self.shape) // BLOCK)
        needed = -(-blocks // GROUP) if part == _NESTED_SCALES else blocks
        found = self.read(f"{self.name}{part}")
        if found.dtype != dtype or found.numel() != needed:
            raise ValueError(
                f"{self.name}{part} has {found.numel()} numbers of {found.dtype}; {needed} of {dtype} were "
                f"needed for blocks of {BLOCK} and groups of {GROUP}"
            )
        return found.view(-1)

    def _check_table(self, part: str, values: list[float]) -> None:
        found = self.read(f"{self.name}{part}").view(-1).double()
        if len(found) != len(values) or (found - torch.tensor(values).double()).abs().max() > _TABLE_ERROR:
            raise ValueError(f"{self.name}{part} is not the table of values of bitsandbytes' {_KIND}")


def quantised_matrices(entries: Mapping[str, Entry], read: Read) -> list[QuantisedMatrix]:
    """Return the quantised matrices among the tensors of files. Raises ``ValueError`` for other kinds."""
    states = [name.partition(_STATE) for name in entries if _STATE in name]
    # Thousands of small reads, each of which waits for a network disk.
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda state: _matrix(state[0], state[2], entries, read), states))


def _matrix(name: str, kind: str, entries: Mapping[str, Entry], read: Read) -> QuantisedMatrix:
    if kind != _KIND:
        raise ValueError(f"{name} is in {kind[:40]} of bitsandbytes; {_KIND} was needed")
    try:
        state = json.loads(bytes(read(f"{name}{_STATE}{kind}").view(torch.uint8).tolist()))
        if len(state["shape"]) != 2:
            raise ValueError(f"it has {len(state['shape'])} dimensions, and 2 were needed")
        outer, inner = (int(size) for size in state["shape"])
        sizes = (int(state["blocksize"]), int(state.get("nested_blocksize", GROUP)))
        offset = float(state["nested_offset"]) if "nested_blocksize" in state else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name}{_STATE}{kind} cannot be read: {str(error)[:100]}") from None
    if sizes != (BLOCK, GROUP):
        raise ValueError(
            f"{name} has blocks of {sizes[0]} and groups of {sizes[1]}; {BLOCK} and {GROUP} were needed"
        )
    matrix = QuantisedMatrix(name, (outer, inner), offset, read)
    missing = [part for part in (name, *matrix.parts) if part not in entries]
    if missing:
        raise ValueError(f"{missing[0]} is missing beside {name}{_STATE}{kind}")
    codes = entries[name].end - entries[name].begin
    if min(outer, inner) < 1 or codes != -(-outer * inner // 2):
        raise ValueError(f"{name} has {codes} bytes of codes, which {outer} x {inner} numbers do not have")
    return matrix
