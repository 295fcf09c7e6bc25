"""Tokens of documents in files that are mapped into memory: written once, shared by all processes.

``tokens.bin`` has the tokens of all documents one after another, ``mask.bin`` a bit for each of them,
``offsets.bin`` the beginnings of documents and the end of the last one, ``trained.bin`` the number of their
tokens that have a loss.

Shapes: N documents, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.documents.counts import ReadingCounts
from orchestrator.errors import UserError

_TOKENS = "tokens.bin"
_MASK = "mask.bin"
_OFFSETS = "offsets.bin"
_TRAINED = "trained.bin"
_COUNTS = "counts.json"


@dataclass(frozen=True)
class TokenDocument:
    """The tokens of a document, and which of them have a loss."""

    tokens_T: np.ndarray
    trained_T: np.ndarray


class StoreWriter:
    """Writes documents into the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._files = {
            name: self._opened.enter_context((folder / name).open("wb"))
            for name in (_TOKENS, _MASK, _OFFSETS, _TRAINED)
        }
        self._bits = np.zeros(0, dtype=bool)
        self._largest = 0
        self.documents = 0
        self.tokens = 0

    def add(self, documents: Sequence[TokenDocument]) -> None:
        if not documents:
            return
        lengths_N = np.array([len(document.tokens_T) for document in documents])
        begins_N = np.cumsum(lengths_N) - lengths_N
        tokens_T = np.concatenate([document.tokens_T for document in documents]).astype(np.uint32)
        trained_T = np.concatenate([document.trained_T for document in documents]).astype(bool)
        # Nothing precedes a first token. So the token after a document's last one never has a loss, and
        # no label crosses documents.
        trained_T[begins_N] = False
        self._files[_TOKENS].write(tokens_T.tobytes())
        self._files[_OFFSETS].write((self.tokens + begins_N).astype(np.int64).tobytes())
        trained_N = np.add.reduceat(trained_T, begins_N, dtype=np.uint32)
        self._files[_TRAINED].write(trained_N.tobytes())
        self._write_bits(trained_T)
        self._largest = max(self._largest, int(tokens_T.max()))
        self.documents += len(documents)
        self.tokens += len(tokens_T)

    def finish(self, counts: ReadingCounts, kind: str) -> None:
        """Write what is left; the folder is whole once this returns. ``kind`` is that of the documents."""
        self._files[_OFFSETS].write(np.int64(self.tokens).tobytes())
        # One token and bit more than there are: the last position has a successor too.
        self._files[_TOKENS].write(np.uint32(0).tobytes())
        self._write_bits(np.zeros(8, dtype=bool))
        self.close()
        facts = {
            "documents": self.documents,
            "tokens": self.tokens,
            "largest_token": self._largest,
            "kind": kind,
            "counts": asdict(counts),
        }
        (self._folder / _COUNTS).write_text(json.dumps(facts))

    def close(self) -> None:
        self._opened.close()

    def _write_bits(self, bits: np.ndarray) -> None:
        self._bits = np.concatenate([self._bits, bits])
        whole = len(self._bits) // 8 * 8
        self._files[_MASK].write(np.packbits(self._bits[:whole]).tobytes())
        self._bits = self._bits[whole:]


class TokenStore:
    """The documents of a folder. It is pickled as the folder's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = _read_facts(folder)
        if facts is None or not is_whole(folder):
            raise UserError(f"the tokenised data in {folder} is gone or damaged; remove it and start again")
        counts: dict[str, Any] = facts["counts"]
        self.counts = ReadingCounts(**counts | {"first_bad": tuple(counts["first_bad"])})
        self.largest_token: int = facts["largest_token"]
        self.kind: str = facts["kind"]
        """The kind of the documents: texts, chats or completions."""
        self.offsets_N = np.memmap(folder / _OFFSETS, dtype=np.int64, mode="r")
        self.trained_N = np.memmap(folder / _TRAINED, dtype=np.uint32, mode="r")
        self._tokens = np.memmap(folder / _TOKENS, dtype=np.uint32, mode="r")
        self._mask = np.memmap(folder / _MASK, dtype=np.uint8, mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._mask.nbytes + self.offsets_N.nbytes

    def tokens_at(self, index: np.ndarray) -> np.ndarray:
        return self._tokens[index].astype(np.int64)

    def trained_at(self, index: np.ndarray) -> np.ndarray:
        """Return whether the tokens at these places of the store have a loss."""
        return (self._mask[index >> 3] >> (7 - (index & 7)).astype(np.uint8) & 1).astype(bool)

    def trained_between(self, begin: int, end: int) -> int:
        """Return how many tokens from ``begin`` up to ``end`` have a loss."""
        first = begin >> 3
        bits = np.unpackbits(self._mask[first : (end + 7) >> 3])
        return int(bits[begin - 8 * first : end - 8 * first].sum())


def is_whole(folder: Path) -> bool:
    """Return whether the files of a store have the sizes that its counts say."""
    facts = _read_facts(folder)
    if facts is None:
        return False
    tokens = facts["tokens"]
    documents = facts["documents"]
    sizes = {
        _TOKENS: 4 * (tokens + 1),
        _MASK: tokens // 8 + 1,
        _OFFSETS: 8 * (documents + 1),
        _TRAINED: 4 * documents,
    }
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def _read_facts(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / _COUNTS).read_text())
    except (OSError, ValueError):
        return None
