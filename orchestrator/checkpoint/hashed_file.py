"""A file with a hash per piece of it, so that a reader verifies no more than it reads."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from orchestrator.errors import CheckpointDamaged
from orchestrator.storage.local_files import open_regular

PIECE_BYTES = 2**23
_MAX_PIECE_BYTES = 2**27
_SYNC_BYTES = 2**28
_MAX_FILE_BYTES = 2**50
_SHA256 = re.compile(r"[0-9a-f]{64}")


def no_progress() -> None:
    """Ignore the progress of reading or writing."""


@dataclass(frozen=True)
class Hashes:
    """The pieces of a file in their order: the size and the sha256 of each."""

    pieces: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.pieces)

    def to_json(self) -> list[list[Any]]:
        return [list(piece) for piece in self.pieces]

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Return the hashes in a manifest. Raises ``ValueError`` if no run can have written them."""
        pieces = tuple((num_bytes, sha256) for num_bytes, sha256 in content)
        for num_bytes, sha256 in pieces:
            is_size = type(num_bytes) is int and 0 < num_bytes <= _MAX_PIECE_BYTES
            if not is_size or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
                raise ValueError(f"a piece of {num_bytes!r} bytes with hash {sha256!r}")
        hashes = cls(pieces)
        if hashes.num_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"a file of {hashes.num_bytes} bytes")
        return hashes


def write_hashed(
    path: Path, pieces: Iterable[memoryview], on_piece: Callable[[], None] = no_progress
) -> Hashes:
    """Write a new file piece by piece, sync it, and return its hashes.

    The hashes are of the bytes in memory: a fault of the file system shows when the file is read."""
    written: list[tuple[int, str]] = []
    unsynced_bytes = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            data = piece
            written.append((len(data), hashlib.sha256(data).hexdigest()))
            while data:
                data = data[os.write(file, data) :]
            unsynced_bytes += len(piece)
            if unsynced_bytes >= _SYNC_BYTES:
                # One sync at the end would take minutes, in which nothing shows progress.
                os.fdatasync(file)
                unsynced_bytes = 0
            on_piece()
        os.fsync(file)
    finally:
        os.close(file)
    return Hashes(tuple(written))


class HashedReader:
    """Reads parts of a hashed file. Each piece is verified before its bytes are used."""

    def __init__(self, path: Path, hashes: Hashes, on_piece: Callable[[], None] = no_progress) -> None:
        self._name = f"{path.parent.name}: {path.name}"
        self._hashes = hashes
        self._ends = list(accumulate(num_bytes for num_bytes, _ in hashes.pieces))
        self._on_piece = on_piece
        self._last: tuple[int, memoryview] | None = None
        """The number and the bytes of the piece that was read last."""
        try:
            self._file = open_regular(path)
            num_bytes = os.fstat(self._file).st_size
        except OSError as error:
            raise self.damage(f"cannot be read: {error.strerror or error}") from None
        if num_bytes != hashes.num_bytes:
            self.close()
            raise self.damage(f"has size {num_bytes}, the manifest says {hashes.num_bytes}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def damage(self, text: str) -> CheckpointDamaged:
        """Return the error for a defect of this file."""
        return CheckpointDamaged(f"{self._name} {text}")

    def read(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the verified bytes from ``begin`` on."""
        while target:
            number = bisect_right(self._ends, begin)
            piece_begin = self._ends[number] - self._hashes.pieces[number][0]
            part = self._piece(number)[begin - piece_begin :][: len(target)]
            target[: len(part)] = part
            target = target[len(part) :]
            begin += len(part)

    def read_bytes(self, begin: int, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        self.read(begin, memoryview(content))
        return content

    def verify(self) -> None:
        """Read every piece. Raises ``CheckpointDamaged`` for a wrong one."""
        for number in range(len(self._ends)):
            self._piece(number)

    def _piece(self, number: int) -> memoryview:
        if self._last is None or self._last[0] != number:
            num_bytes, expected = self._hashes.pieces[number]
            data = self._read_unverified(self._ends[number] - num_bytes, num_bytes)
            actual = hashlib.sha256(data).hexdigest()
            if actual != expected:
                raise self.damage(f"has sha256 {actual} in piece {number}, the manifest says {expected}")
            self._last = (number, data)
            self._on_piece()
        return self._last[1]

    def _read_unverified(self, begin: int, num_bytes: int) -> memoryview:
        data = memoryview(bytearray(num_bytes))
        rest = data
        try:
            while rest:
                count = os.preadv(self._file, [rest], begin)
                if count == 0:
                    raise OSError("it has become shorter")
                rest = rest[count:]
                begin += count
        except OSError as error:
            raise self.damage(f"cannot be read: {error.strerror or error}") from None
        return data
