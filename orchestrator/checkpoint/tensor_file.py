"""Safetensors files that are hashed in pieces, and read in part.

A file has its header in a piece of its own, then the tensors. Tensors of experts and others never
share a piece, so that a host reads little more than the experts that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from experts.tensor_format import (
    DTYPE_NAMES,
    LENGTH_BYTES,
    Entry,
    bytes_of,
    header_length,
    pack_header,
    parse_header,
)
from orchestrator.checkpoint.hashed_file import (
    PIECE_BYTES,
    HashedReader,
    Hashes,
    no_progress,
    write_hashed,
)
from orchestrator.errors import UserError


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise ``UserError`` for a tensor that a checkpoint cannot hold."""
    if tensor.dtype not in DTYPE_NAMES:
        raise UserError(f"{name} is {tensor.dtype}; safetensors can hold {', '.join(map(str, DTYPE_NAMES))}")


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
        yield memoryview(pack_header({key: (tensors[key].dtype, tuple(tensors[key].shape)) for key in keys}))
        for section in sections:
            yield from _pieces(tensors[key] for key in section)

    return write_hashed(path, pieces(), on_piece)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one after the other, in pieces of at most ``PIECE_BYTES``."""
    collected = bytearray()
    for tensor in tensors:
        rest = bytes_of(tensor)
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
        entries, data_begin = read_header(reader, hashes.num_bytes)
        tensors: dict[str, Tensor] = {}
        for entry in entries:
            if is_needed(entry.name):
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                reader.read(data_begin + entry.begin, bytes_of(tensor))
                tensors[entry.name] = tensor
        return tensors


def read_header(reader: HashedReader, file_bytes: int) -> tuple[list[Entry], int]:
    """Return the entries of a file in the order of their data, and where the data begins."""
    length = header_length(reader.read_bytes(0, min(LENGTH_BYTES, file_bytes)), file_bytes)
    data_begin = LENGTH_BYTES + length
    entries = parse_header(reader.read_bytes(LENGTH_BYTES, length), file_bytes - data_begin)
    return entries, data_begin
