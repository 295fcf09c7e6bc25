"""Reads a model's weights from safetensors files: on each host only what it holds.

Each piece is read, converted and copied to its place by itself, so that the peak of memory is that of
the model's own tensors and a few pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experts.transformers.files.initial import restore_buffers
from experts.transformers.files.names import (
    Division,
    Grouping,
    TensorGroup,
    check_complete,
    convert,
    division_of,
    group_keys,
)
from experts.transformers.files.pieces import PIECE_BYTES, OnProgress, Piece, no_progress, run_pieces
from experts.transformers.files.places import (
    ExpertsPlace,
    PackedTarget,
    Place,
    Places,
    Target,
    check_memory,
    places_of,
)
from experts.transformers.files.shards import Shards, Slice, open_shards

_READERS = 4
"""Threads: a network disk answers several requests at once."""


@dataclass(frozen=True)
class WeightsRead:
    """The cost of reading a model's weights."""

    bytes_read: int
    """All bytes that were read from the files, headers included."""
    file_bytes: int
    """The bytes of all tensors in the files."""
    seconds: float
    unexpected: tuple[str, ...] = ()
    """Names in the files that the model has no tensor for. They were not read."""


Parts = Mapping[str, Sequence[Slice]]
"""Parts of the files by the patterns of a conversion."""


@torch.no_grad()
def read_weights(model: Any, folder: Path, on_progress: OnProgress = no_progress) -> WeightsRead:
    """Fill a model of ``transformers`` with the weights in a folder, in place.

    The model has memory, and each of its banks holds the experts of this host alone: built on meta,
    changed by ``use``, placed, then ``to_empty``. Weights are converted to the types of the model.
    Buffers that no file holds are computed again. Raises ``ValueError`` for files that are missing,
    damaged, quantised or of another model."""
    began_s = perf_counter()
    check_memory(model)
    # Tied tensors are two after to_empty.
    model.tie_weights()
    restore_buffers(model)
    places = places_of(model)
    with open_shards(folder) as shards:
        grouping = group_keys(model, shards.entries, places)
        check_complete(model, grouping, places)
        pieces = list(_pieces(model, grouping, places, shards))
        run_pieces(pieces, _READERS, on_progress)
        file_bytes = sum(entry.end - entry.begin for entry in shards.entries.values())
        seconds = perf_counter() - began_s
        return WeightsRead(shards.bytes_read, file_bytes, seconds, tuple(grouping.unexpected))


def _pieces(model: Any, grouping: Grouping, places: Places, shards: Shards) -> Iterator[Piece]:
    filled: set[int] = set()
    for group in grouping.groups:
        place = places[group.target]
        if isinstance(place, ExpertsPlace):
            yield from _expert_pieces(model, group, places, shards)
        elif place.memory.data_ptr() not in filled:
            # Tied tensors share memory: only the first is read.
            filled.add(place.memory.data_ptr())
            if group.converter is None:
                yield from _row_pieces(place, group.all_keys[0], shards)
            else:
                yield _converted_piece(model, group, whole_parts(group), places, shards)


def _row_pieces(place: Place, key: str, shards: Shards) -> Iterator[Piece]:
    """Read a tensor that is not converted, some rows at a time. One that is packed is read whole."""
    found = shards.entries[key].shape
    if found != place.shape:
        raise _wrong_shape(shards, key, found, place.shape)
    whole = Slice(key)
    tensor = place.target
    is_whole = isinstance(tensor, PackedTarget) or shards.is_quantised(key)
    if is_whole or shards.num_bytes(whole) <= PIECE_BYTES:
        yield Piece(shards.num_bytes(whole), _copying(shards, whole, tensor))
        return
    row_bytes = shards.num_bytes(Slice(key, (0, 1)))
    step = max(1, PIECE_BYTES // row_bytes)
    for begin in range(0, found[0], step):
        part = Slice(key, (begin, min(begin + step, found[0])))
        target = tensor[begin : begin + step]
        yield Piece(shards.num_bytes(part), _copying(shards, part, target))


def _copying(shards: Shards, part: Slice, target: Target) -> Callable[[], None]:
    """Return a function that reads a tensor into its place."""

    def fill() -> None:
        if isinstance(target, Tensor) and _takes_bytes(target, shards.entries[part.name].dtype):
            shards.read(part, into=target)
        else:
            _put(shards.read(part), [part], target, shards)

    return fill


def _put(value: Tensor, parts: Sequence[Slice], target: Target, shards: Shards) -> None:
    """Copy numbers that come from parts of the files."""
    if isinstance(target, PackedTarget):
        target.copy_(value, shards.packed(parts))
    else:
        target.copy_(value)


def _takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of a file with numbers of a type can be read into a tensor."""
    return target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()


def _expert_pieces(model: Any, group: TensorGroup, places: Places, shards: Shards) -> Iterator[Piece]:
    """Read the tensors, or the rows, of the experts that this host holds."""
    place = places[group.target]
    assert isinstance(place, ExpertsPlace)
    shapes = {key: shards.entries[key].shape for key in group.all_keys}
    division = division_of(group, place, shapes)
    if division == "none" and place.held:
        yield _converted_piece(model, group, whole_parts(group), places, shards)
        return
    for row in place.held:
        yield _converted_piece(model, group, expert_parts(group, division, row), places, shards, row)


def _converted_piece(
    model: Any, group: TensorGroup, parts: Parts, places: Places, shards: Shards, row: int | None = None
) -> Piece:
    """Read and convert parts of the files: those of one expert with ``row``, else all of a group."""
    slices = [part for each in parts.values() for part in each]

    def fill() -> None:
        for name, value in converted(model, group, parts, places, shards, row).items():
            place = places[name]
            needed = place.shape if row is None else (1, *place.shape[1:])
            if tuple(value.shape) != needed:
                key = next(iter(parts.values()))[0].name
                in_file = slice(0 if row is None else 1, None)
                raise _wrong_shape(shards, key, tuple(value.shape)[in_file], needed[in_file])
            if isinstance(place, Place):
                place.target.copy_(value)
            elif row is not None:
                _put(value, slices, place.held[row], shards)
            else:
                for held_row, target in place.held.items():
                    target.copy_(value[held_row : held_row + 1])

    return Piece(sum(shards.num_bytes(part) for part in slices), fill)


def whole_parts(group: TensorGroup) -> Parts:
    """Return all tensors of a group in the files."""
    return {pattern: [Slice(key) for key in keys] for pattern, keys in group.keys.items()}


def expert_parts(group: TensorGroup, division: Division, row: int) -> Parts:
    """Return the tensors of one expert in the files, or its rows of them."""
    rows = (row, row + 1) if division == "rows" else None
    number = row if division == "names" else 0
    return {pattern: [Slice(keys[number], rows)] for pattern, keys in group.keys.items()}


def converted(
    model: Any, group: TensorGroup, parts: Parts, places: Places, shards: Shards, row: int | None = None
) -> Mapping[str, Tensor]:
    """Read parts of the files, and return them as tensors of the model: whole, or those of one expert."""
    inputs = {pattern: [shards.read(part) for part in slices] for pattern, slices in parts.items()}
    if group.converter is None:
        ((value,),) = inputs.values()
        return {group.target: value}
    try:
        return convert(group, inputs, model.config, places, row)
    except (RuntimeError, ValueError) as error:
        found = ", ".join(f"{key} {shards.entries[key].shape}" for key in group.all_keys[:2])
        raise ValueError(
            f"{shards.folder}: {found} cannot become {group.target} ({str(error)[:200]}); config.json and "
            "the weights are of different models"
        ) from None


def _wrong_shape(shards: Shards, key: str, found: tuple[int, ...], needed: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{key} in {shards.folder / shards.file_of(key)} has shape {found}; the model of config.json needs "
        f"{needed}: they are of different models"
    )
