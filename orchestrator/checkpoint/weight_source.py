"""The weights of a checkpoint, read tensor by tensor by several threads, and verified as they are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from experts.tensor_format import Entry, bytes_of
from experts.transformers.files.original import Stored
from orchestrator.checkpoint.files import AVERAGE_SLOT, listed_files, tensor_files
from orchestrator.checkpoint.hashed_file import HashedReader
from orchestrator.checkpoint.tensor_file import read_header
from orchestrator.errors import CheckpointDamaged, UserError


class _Location(NamedTuple):
    """The place of a tensor: its file, where the file's data begins, and its entry there."""

    file: str
    data_begin: int
    entry: Entry


class CheckpointWeights:
    """The model's tensors in a checkpoint, or their average where it has one."""

    def __init__(self, path: Path, averaged: bool = False) -> None:
        self._path = path
        self._files = listed_files(path)
        self._locations: dict[str, _Location] = {}
        self._own = threading.local()
        self._opened: list[HashedReader] = []
        self._lock = threading.Lock()
        averages: dict[str, _Location] = {}
        for name, kind in tensor_files(self._files):
            if kind == "model":
                self._locations |= self._entries_of(name)
            elif averaged:
                averages |= self._entries_of(name)
        if averaged:
            self._use_averages(averages)
        numbers = {name: number for number, name in enumerate(sorted(self._files))}
        self.stored: Mapping[str, Stored] = {
            name: Stored(place.entry.dtype, place.entry.shape, (numbers[place.file], place.entry.begin))
            for name, place in self._locations.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._opened:
            reader.close()

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a tensor, or a range of its rows. Raises ``CheckpointDamaged`` for a wrong hash."""
        place = self._locations[name]
        entry = place.entry
        shape = entry.shape
        offset = 0
        if rows is not None:
            begin, end = rows
            shape = (end - begin, *entry.shape[1:])
            offset = begin * prod(entry.shape[1:]) * entry.dtype.itemsize
        tensor = torch.empty(shape, dtype=entry.dtype)
        self._reader(place.file).read(place.data_begin + entry.begin + offset, bytes_of(tensor))
        return tensor

    def _reader(self, file: str) -> HashedReader:
        """Return the reader of this thread: each remembers the piece that it verified last."""
        readers: dict[str, HashedReader] | None = getattr(self._own, "readers", None)
        if readers is None:
            readers = {}
            self._own.readers = readers
        if file not in readers:
            reader = HashedReader(self._path / file, self._files[file])
            readers[file] = reader
            with self._lock:
                self._opened.append(reader)
        return readers[file]

    def _entries_of(self, file: str) -> dict[str, _Location]:
        try:
            entries, data_begin = read_header(self._reader(file), self._files[file].num_bytes)
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
            reason = str(error)[:200]
            raise CheckpointDamaged(f"{self._path.name}: {file} cannot be read: {reason}") from None
        return {entry.name: _Location(file, data_begin, entry) for entry in entries}

    def _use_averages(self, optimizer: dict[str, _Location]) -> None:
        prefix = f"{AVERAGE_SLOT}/"
        averages = {
            key.removeprefix(prefix): place for key, place in optimizer.items() if key.startswith(prefix)
        }
        if not averages:
            raise UserError(
                "the checkpoint has no average of the weights, which a run keeps with --ema-decay; give "
                "--weights trained"
            )
        self._locations |= averages
