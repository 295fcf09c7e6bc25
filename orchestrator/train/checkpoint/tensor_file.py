"""Safetensors files that are hashed in pieces, and read in part.

A file has its header in a piece of its own, then the tensors. Tensors of experts and others never
share a piece, so that a host reads little more than the experts that it needs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestrator.errors import UserError
from orchestrator.train.checkpoint.hashed_file import (
    PIECE_BYTES,
    HashedReader,
    Hashes,
    no_progress,
    write_hashed,
)

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 10**8  # the limit of the safetensors library too
_MAX_DIMS = 64
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    """The place of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise ``UserError`` for a tensor that a checkpoint cannot hold."""
    if tensor.dtype not in _DTYPE_NAMES:
        raise UserError(f"{name} is {tensor.dtype}; safetensors can hold {', '.join(map(str, _DTYPE_NAMES))}")


# Writing


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    experts: Set[str],
    on_piece: Callable[[], None] = no_progress,
) -> Hashes:
    """Write tensors in host memory as a new safetensors file, and sync it.

    ``experts`` has the keys of the tensors that belong to experts."""
    # The largest elements first, as readers of the format need aligned tensors. Apart from that and
    # from the sections, the tensors stay in their order.
    keys = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key in experts))
    sections = [list(section) for _, section in groupby(keys, experts.__contains__)]

    def pieces() -> Iterator[memoryview]:
        yield memoryview(_header({key: tensors[key] for key in keys}))
        for section in sections:
            yield from _pieces(tensors[key] for key in section)

    return write_hashed(path, pieces(), on_piece)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one after the other, in pieces of at most ``PIECE_BYTES``."""
    collected = bytearray()
    for tensor in tensors:
        rest = _bytes_of(tensor)
        while rest:
            # A large tensor is not copied: the copy would hold the interpreter's lock.
            if not collected and len(rest) >= PIECE_BYTES:
                yield rest[:PIECE_BYTES]
                rest = rest[PIECE_BYTES:]
                continue
            part = rest[: PIECE_BYTES - len(collected)]
            collected += part
            rest = rest[len(part) :]
            if len(collected) == PIECE_BYTES:
                yield memoryview(collected)
                collected = bytearray()
    if collected:
        yield memoryview(collected)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor as bytes. A contiguous tensor is not copied."""
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


# Reading


def read_tensors(
    path: Path,
    hashes: Hashes,
    is_needed: Callable[[str], bool],
    on_piece: Callable[[], None] = no_progress,
) -> dict[str, Tensor]:
    """Read and verify the needed tensors of a file.

    Raises ``CheckpointDamaged`` for a wrong hash, and ``ValueError`` for a header that no run
    writes. The memory that this takes is bounded by the size of the file."""
    with HashedReader(path, hashes, on_piece) as reader:
        entries, data_begin = _read_header(reader, hashes.num_bytes)
        tensors: dict[str, Tensor] = {}
        for entry in entries:
            if is_needed(entry.name):
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                reader.read(data_begin + entry.begin, _bytes_of(tensor))
                tensors[entry.name] = tensor
        return tensors


def _read_header(reader: HashedReader, file_bytes: int) -> tuple[list[_Entry], int]:
    """Return the entries of a file in the order of their data, and where the data begins."""
    if file_bytes < _LENGTH_BYTES:
        raise ValueError("the file has no header")
    (length,) = struct.unpack("<Q", reader.read_bytes(0, _LENGTH_BYTES))
    data_begin = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or data_begin > file_bytes:
        raise ValueError(f"the header has a length of {length} bytes in a file of {file_bytes}")
    header = json.loads(reader.read_bytes(_LENGTH_BYTES, length))
    if not isinstance(header, dict):
        raise ValueError(f"the header is a {type(header).__name__}")
    entries = [_entry(name, fields) for name, fields in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    # The tensors must fill the file without a gap and without sharing a byte.
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"{entry.name!r} begins at {entry.begin}, not at {end}")
        end = entry.end
    if end != file_bytes - data_begin:
        raise ValueError(f"the tensors end at {end}, the data at {file_bytes - data_begin}")
    return entries, data_begin


def _entry(name: str, fields: Any) -> _Entry:
    dtype = _DTYPES[fields["dtype"]]
    shape = tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    sizes_are_valid = len(shape) <= _MAX_DIMS and all(type(size) is int and size >= 0 for size in shape)
    if not sizes_are_valid or type(begin) is not int or type(end) is not int:
        raise ValueError(f"{name!r} has shape {shape} and offsets {[begin, end]}")
    # A shape with a zero holds nothing, however large its other sizes are.
    if end - begin != prod(shape) * dtype.itemsize or max(shape, default=0) >= 2**48:
        raise ValueError(f"{name!r} has shape {shape}, and {end - begin} bytes")
    return _Entry(name, dtype, shape, begin, end)
