"""Reads rows of files, and tokenises them in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.documents.counts import BadRows, ReadingCounts
from orchestrator.data.documents.encoding import Encoder
from orchestrator.data.documents.kinds import (
    CHAT,
    TEXT,
    BadRowError,
    Chat,
    Completion,
    ParsedRow,
    RowParser,
    TextRow,
)
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.rows import BadRow, Row, RowFile
from orchestrator.data.documents.store import StoreWriter, TokenDocument
from orchestrator.errors import UserError

_ROWS_AT_ONCE = 1000
_SIZE_AT_ONCE = 2**23
_SECONDS_BETWEEN_NOTES = 5


class DocumentReader:
    """One pass over files of rows. It can be used once: its counts are those of the pass."""

    def __init__(self, tokenizer: Any, options: DocumentOptions, note: Callable[[str], None]) -> None:
        self._note = note
        self.counts = ReadingCounts()
        self._bad_rows = BadRows(self.counts, options.skip_bad)
        self._encoder = Encoder(tokenizer, options, self.counts, self._bad_rows)
        self._parser = RowParser(options.text_column)
        self._kind: str | None = None
        """The kind of the documents. Prompts and completions that are messages become chats."""

    def write(self, files: Sequence[RowFile], folder: Path) -> None:
        """Write the documents of files into the files of a store. Raises ``UserError`` if there are none."""
        try:
            with closing(StoreWriter(folder)) as writer:
                self._write(files, writer)
        except OSError as error:
            raise UserError(f"cannot write the tokenised data into {folder.parent}: {error}") from None

    def _write(self, files: Sequence[RowFile], writer: StoreWriter) -> None:
        progress = _Progress(sum(file.size for file in files), self._note)
        for batch in _batches(row for file in files for row in file.rows()):
            for documents in self._encode(batch):
                writer.add(documents)
            progress.add(sum(row.size for row in batch), writer)
        if not writer.documents:
            raise UserError(f"no document to train on in {self.counts.rows} rows of the data{self._faults()}")
        assert self._kind is not None
        writer.finish(self.counts, self._kind)
        progress.finish(writer)

    def _faults(self) -> str:
        """Return why no row became a document."""
        counts = self.counts
        faults = []
        if counts.bad_lines:
            faults.append(f"{counts.bad_lines} are bad, the first: {counts.first_bad[0]}")
        if counts.nothing_to_train:
            faults.append(f"{counts.nothing_to_train} have nothing to train on")
        return f"; {'; '.join(faults)}" if faults else ""

    def _encode(self, batch: Sequence[Row | BadRow]) -> Iterator[list[TokenDocument]]:
        self.counts.rows += len(batch)
        parsed: list[ParsedRow] = []
        for row in batch:
            if isinstance(row, BadRow):
                self._bad_rows.add(row.message)
            elif isinstance(row.value, np.ndarray):
                self._parser.check_kind(TEXT, row.place)
                self._kind = TEXT
                yield from self._encoder.encode_tokens(row.value)
            else:
                parsed += self._parse(row)
        yield self._encoder.encode_texts([row for row in parsed if isinstance(row, TextRow)])
        yield self._encoder.encode_completions([row for row in parsed if isinstance(row, Completion)])
        yield self._encoder.encode_chats(self._render(row for row in parsed if isinstance(row, Chat)))

    def _parse(self, row: Row) -> list[ParsedRow]:
        try:
            parsed = self._parser.parse(row)
        except BadRowError as error:
            self._bad_rows.add(f"{row.place} {error}")
            return []
        self._kind = CHAT if isinstance(parsed, Chat) else self._parser.kind
        return [parsed]

    def _render(self, chats: Iterable[Chat]) -> list[Any]:
        rendered = []
        for chat in chats:
            try:
                rendered.append(self._encoder.render(chat))
            except BadRowError as error:
                self._bad_rows.add(f"{chat.place} {error}")
        return rendered


class _Progress:
    """Notes about a pass, at most one every few seconds."""

    def __init__(self, total: float, note: Callable[[str], None]) -> None:
        self._total = total
        self._note = note
        self._done = 0.0
        self._begin = time.monotonic()
        self._last = self._begin

    def add(self, size: float, writer: StoreWriter) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_NOTES:
            self._last = now
            share = f", {min(self._done / self._total, 1):.0%} read" if self._total and self._done else ""
            self._note(f"tokenising: {self._figures(writer)}{share}")

    def finish(self, writer: StoreWriter) -> None:
        self._note(f"tokenised {self._figures(writer)}")

    def _figures(self, writer: StoreWriter) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-3)
        return (
            f"{writer.documents:,} documents, {writer.tokens:,} tokens "
            f"({writer.documents / seconds:,.0f} documents/s)"
        )


def _batches(rows: Iterable[Row | BadRow]) -> Iterator[list[Row | BadRow]]:
    """Yield rows in lists of bounded number and size: rows of some data sets are whole books."""
    batch: list[Row | BadRow] = []
    size = 0.0
    for row in rows:
        batch.append(row)
        size += row.size
        if len(batch) >= _ROWS_AT_ONCE or size >= _SIZE_AT_ONCE:
            yield batch
            batch = []
            size = 0.0
    if batch:
        yield batch
