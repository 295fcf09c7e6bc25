"""The header of a safetensors file: names, types, shapes and places of its tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH_BYTES = 8
"""The bytes before the header, which hold its length."""
MAX_HEADER_BYTES = 10**8
"""The limit of the safetensors library too."""
DTYPES: Mapping[str, torch.dtype] = {
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMS = 64


class Entry(NamedTuple):
    """The place of a tensor in the data of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def pack_header(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a file whose tensors follow in the given order."""
    # Readers of transformers ask for the format.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def header_length(first_bytes: bytes | bytearray, file_bytes: int) -> int:
    """Return the length of the header from the first bytes of a file.

    Raises ``ValueError`` if the file cannot have such a header."""
    if file_bytes < LENGTH_BYTES:
        raise ValueError("the file has no header")
    (length,) = struct.unpack("<Q", first_bytes)
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
        raise ValueError(f"the header has a length of {length} bytes in a file of {file_bytes}")
    return length


def parse_header(text: bytes | bytearray, data_bytes: int) -> list[Entry]:
    """Return the entries of a header in the order of their data.

    ``data_bytes`` follow the header. Raises ``ValueError`` unless the tensors fill them without a gap
    and without sharing a byte."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"the header is a {type(header).__name__}")
    entries = [_entry(name, fields) for name, fields in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"{entry.name!r} begins at {entry.begin}, not at {end}")
        end = entry.end
    if end != data_bytes:
        raise ValueError(f"the tensors end at {end}, the data at {data_bytes}")
    return entries


def _entry(name: str, fields: Any) -> Entry:
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} has the type {str(fields['dtype'])[:20]}, which is unknown here")
    dtype = DTYPES[fields["dtype"]]
    shape = tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    sizes_are_valid = len(shape) <= _MAX_DIMS and all(type(size) is int and size >= 0 for size in shape)
    if not sizes_are_valid or type(begin) is not int or type(end) is not int:
        raise ValueError(f"{name!r} has shape {shape} and offsets {[begin, end]}")
    # A shape with a zero holds nothing, however large its other sizes are.
    if end - begin != prod(shape) * dtype.itemsize or max(shape, default=0) >= 2**48:
        raise ValueError(f"{name!r} has shape {shape}, and {end - begin} bytes")
    return Entry(name, dtype, shape, begin, end)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU as bytes. A contiguous tensor is not copied."""
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
