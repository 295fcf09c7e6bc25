"""Reads a model's weights from safetensors files: on each host only what it holds.

Each piece is read, converted and copied to its place by itself, so that the peak of memory is that of
the model's own tensors and a few pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from experts.transformers.files.places import ExpertsPlace, Place, Places, check_memory, places_of
from experts.transformers.files.shards import Shards, Slice, open_shards

_PIECE_BYTES = 2**25
_READERS = 4
"""Threads: a network disk answers several requests at once."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and all bytes that this host reads."""


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


@dataclass(frozen=True)
class _Piece:
    """Some bytes of the files, and the function that brings them to their place."""

    num_bytes: int
    fill: Callable[[], None]


Parts = Mapping[str, Sequence[Slice]]
"""Parts of the files by the patterns of a conversion."""


def no_progress(done_bytes: int, all_bytes: int) -> None:
    """Ignore the progress of reading."""


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
        _fill_all(pieces, on_progress)
        file_bytes = sum(entry.end - entry.begin for entry in shards.entries.values())
        seconds = perf_counter() - began_s
        return WeightsRead(shards.bytes_read, file_bytes, seconds, tuple(grouping.unexpected))


def _fill_all(pieces: Sequence[_Piece], on_progress: OnProgress) -> None:
    all_bytes = sum(piece.num_bytes for piece in pieces)
    done_bytes = 0
    on_progress(done_bytes, all_bytes)
    pool = ThreadPoolExecutor(_READERS, "read-weights")
    try:
        fills = {pool.submit(torch.no_grad()(piece.fill)): piece for piece in pieces}
        for fill in as_completed(fills):
            fill.result()
            done_bytes += fills[fill].num_bytes
            on_progress(done_bytes, all_bytes)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(model: Any, grouping: Grouping, places: Places, shards: Shards) -> Iterator[_Piece]:
    filled: set[int] = set()
    for group in grouping.groups:
        place = places[group.target]
        if isinstance(place, ExpertsPlace):
            yield from _expert_pieces(model, group, places, shards)
        elif place.tensor.data_ptr() not in filled:
            # Tied tensors share memory: only the first is read.
            filled.add(place.tensor.data_ptr())
            if group.converter is None:
                yield from _row_pieces(place, group.all_keys[0], shards)
            else:
                yield _whole_piece(model, group, places, shards)


def _row_pieces(place: Place, key: str, shards: Shards) -> Iterator[_Piece]:
    """Read a tensor that is not converted, some rows at a time."""
    found = shards.entries[key].shape
    if found != place.shape:
        raise _wrong_shape(shards, key, found, place.shape)
    whole = Slice(key)
    if shards.num_bytes(whole) <= _PIECE_BYTES:
        yield _Piece(shards.num_bytes(whole), _copying(shards, whole, place.tensor))
        return
    row_bytes = shards.num_bytes(Slice(key, (0, 1)))
    step = max(1, _PIECE_BYTES // row_bytes)
    for begin in range(0, found[0], step):
        part = Slice(key, (begin, min(begin + step, found[0])))
        target = place.tensor[begin : begin + step]
        yield _Piece(shards.num_bytes(part), _copying(shards, part, target))


def _copying(shards: Shards, part: Slice, target: Tensor) -> Callable[[], None]:
    """Return a function that reads a tensor into its place."""

    def fill() -> None:
        is_same = target.dtype == shards.entries[part.name].dtype
        if is_same and target.device.type == "cpu" and target.is_contiguous():
            shards.read(part, into=target)
        else:
            target.copy_(shards.read(part))

    return fill


def _whole_piece(model: Any, group: TensorGroup, places: Places, shards: Shards) -> _Piece:
    """Read and convert all tensors of a group at once."""
    parts = whole_parts(group)

    def fill() -> None:
        for name, value in converted(model, group, parts, places, shards).items():
            place = places[name]
            if tuple(value.shape) != place.shape:
                raise _wrong_shape(shards, group.all_keys[0], tuple(value.shape), place.shape)
            if isinstance(place, Place):
                place.tensor.copy_(value)
                continue
            for row, target in place.held.items():
                target.copy_(value[row : row + 1])

    return _Piece(_sum_bytes(parts, shards), fill)


def _expert_pieces(model: Any, group: TensorGroup, places: Places, shards: Shards) -> Iterator[_Piece]:
    """Read the tensors, or the rows, of the experts that this host holds."""
    place = places[group.target]
    assert isinstance(place, ExpertsPlace)
    shapes = {key: shards.entries[key].shape for key in group.all_keys}
    division = division_of(group, place, shapes)
    if division == "none" and place.held:
        yield _whole_piece(model, group, places, shards)
        return
    for row in place.held:
        parts = expert_parts(group, division, row)
        yield _expert_piece(model, group, (row, parts), places, shards)


def _expert_piece(
    model: Any, group: TensorGroup, expert: tuple[int, Parts], places: Places, shards: Shards
) -> _Piece:
    """Read and convert one expert: its row, and its parts of the files."""
    row, parts = expert

    def fill() -> None:
        for name, value in converted(model, group, parts, places, shards, row).items():
            place = places[name]
            assert isinstance(place, ExpertsPlace)
            target = place.held[row]
            if value.shape != target.shape:
                key = next(iter(parts.values()))[0].name
                raise _wrong_shape(shards, key, tuple(value.shape[1:]), tuple(target.shape[1:]))
            target.copy_(value)

    return _Piece(_sum_bytes(parts, shards), fill)


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


def _sum_bytes(parts: Parts, shards: Shards) -> int:
    return sum(shards.num_bytes(part) for slices in parts.values() for part in slices)


def _wrong_shape(shards: Shards, key: str, found: tuple[int, ...], needed: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{key} in {shards.folder / shards.file_of(key)} has shape {found}; the model of config.json needs "
        f"{needed}: they are of different models"
    )
