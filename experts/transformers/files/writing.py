"""Writes a checkpoint's tensors as the safetensors files of a ``transformers`` model.

The sizes of all files are known before the first byte is read. Several threads read, convert and write
one expert, or some rows of a dense tensor, at a time: reading, hashing, copying and writing leave the
interpreter to the others. Memory is bounded by one such piece per thread, whatever the model's size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from experts.tensor_format import bytes_of, pack_header
from experts.transformers.files.original import OriginalNames, Output, Shape, Stored, Unit, WritingPlan
from experts.transformers.files.pieces import PIECE_BYTES, OnProgress, Piece, run_pieces
from experts.transformers.files.shards import INDEX

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

Rows = tuple[int, int]


class TensorSource(Protocol):
    """A checkpoint, which several threads read."""

    stored: Mapping[str, Stored]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor, or a range of its rows."""
        ...


@dataclass(frozen=True)
class _Span:
    """The place of a tensor in the files."""

    file: int
    begin: int
    dtype: torch.dtype
    shape: Shape

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


def write_weights(
    original: OriginalNames,
    plan: WritingPlan,
    source: TensorSource,
    folder: Path,
    shard_bytes: int,
    on_progress: OnProgress,
) -> int:
    """Write the planned files and their index, and return the bytes of their tensors.

    ``folder`` is empty. ``on_progress`` is called with the bytes done and all bytes."""
    split = _split(plan.shapes, shard_bytes)
    with _opened(folder, split.filename_to_tensors, plan.shapes) as (files, spans):
        writer = _Writer(original, source, files, spans)
        run_pieces(list(_pieces(plan, source, writer)), min(8, os.cpu_count() or 1), on_progress)
        for file in files:
            os.fsync(file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return split.metadata["total_size"]


def _split(shapes: Mapping[str, tuple[torch.dtype, Shape]], shard_bytes: int) -> StateDictSplit:
    """Divide tensors among files of at most ``shard_bytes``; a larger tensor has a file of its own."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import dot_natural_key

    return split_state_dict_into_shards_factory(
        {name: shapes[name] for name in sorted(shapes, key=dot_natural_key)},
        get_storage_size=lambda tensor: prod(tensor[1]) * tensor[0].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )


@contextmanager
def _opened(
    folder: Path, names_of: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[torch.dtype, Shape]]
) -> Iterator[tuple[list[int], dict[str, _Span]]]:
    """Create the files with their headers, and yield them with the place of each tensor."""
    spans: dict[str, _Span] = {}
    files: list[int] = []
    with ExitStack() as stack:
        for number, (file_name, names) in enumerate(names_of.items()):
            # Tensors with large elements first: readers of the format need aligned ones.
            names = sorted(names, key=lambda name: -shapes[name][0].itemsize)
            header = pack_header({name: shapes[name] for name in names})
            file = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, file)
            files.append(file)
            _write_at(file, 0, memoryview(header))
            begin = len(header)
            for name in names:
                dtype, shape = shapes[name]
                spans[name] = _Span(number, begin, dtype, shape)
                begin += prod(shape) * dtype.itemsize
            os.ftruncate(file, begin)
        yield files, spans


def _write_at(file: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data = data[count:]
        offset += count


def _pieces(plan: WritingPlan, source: TensorSource, writer: _Writer) -> Iterator[Piece]:
    for unit in plan.units:
        stored = [source.stored[name] for names in unit.inputs.values() for name in names]
        num_bytes = sum(prod(each.shape) * each.dtype.itemsize for each in stored)
        if not unit.is_plain or num_bytes <= PIECE_BYTES or not stored[0].shape:
            yield Piece(num_bytes, partial(writer.write, unit))
            continue
        num_rows = stored[0].shape[0]
        step = max(1, PIECE_BYTES * num_rows // num_bytes)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            yield Piece((end - begin) * (num_bytes // num_rows), partial(writer.write, unit, (begin, end)))


class _Writer:
    """Brings pieces of a checkpoint to their places in the files. Several threads share it."""

    def __init__(
        self,
        original: OriginalNames,
        source: TensorSource,
        files: Sequence[int],
        spans: Mapping[str, _Span],
    ) -> None:
        self._original = original
        self._source = source
        self._files = files
        self._spans = spans

    def write(self, unit: Unit, rows: Rows | None = None) -> None:
        """Write a unit, or some rows of one that only its name changes."""
        if unit.is_plain:
            ((name,),) = unit.inputs.values()
            self._put(unit.outputs[0], self._source.read(name, rows), rows[0] if rows else 0)
            return
        tensors = {name: self._read(name, names) for name, names in unit.inputs.items()}
        written = self._original.revert(tensors)
        # The conversion names a single expert 0: match outputs by their order, not by their names.
        for output, tensor in zip(unit.outputs, written.values(), strict=True):
            self._put(output, tensor, output.row or 0)

    def _read(self, name: str, stored_names: Sequence[str]) -> Tensor:
        tensors = [self._source.read(stored_name) for stored_name in stored_names]
        return tensors[0] if stored_names[0] == name else self._original.stack(name, tensors)

    def _put(self, output: Output, tensor: Tensor, begin_row: int) -> None:
        span = self._spans[output.name]
        data = bytes_of(tensor.to(span.dtype))
        _write_at(self._files[span.file], span.begin + begin_row * span.row_bytes, data)
