"""Counts of documents, for notes and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import UserError
from orchestrator.types import counted

_NUM_NAMED = 3


@dataclass
class ReadingCounts:
    """Counts of what was read, whatever samples were made of it later."""

    rows: int = 0
    bad_lines: int = 0
    first_bad: tuple[str, ...] = ()
    """Messages about the first bad rows."""
    nothing_to_train: int = 0
    """Rows without a token that has a loss; they are left out."""
    empty_answers: int = 0
    without_stop: int = 0
    """Answers after which the chat template places no token that ends the turn."""


class BadRows:
    """Rows that cannot be used: the first one is an error, or they are counted and left out."""

    def __init__(self, counts: ReadingCounts, skip: bool) -> None:
        self._counts = counts
        self._skip = skip

    def add(self, message: str) -> None:
        """Count a row. Raises ``UserError`` with the message unless bad rows are skipped."""
        if not self._skip:
            raise UserError(f"{message}. --skip-bad leaves such rows out and counts them")
        self._counts.bad_lines += 1
        if len(self._counts.first_bad) < _NUM_NAMED:
            self._counts.first_bad += (message,)


@dataclass(frozen=True)
class DocumentCounts:
    """Counts of a set of samples, and of the reading of all files."""

    documents: int
    tokens: int
    trained_tokens: int
    """Tokens that are the target of a position."""
    truncated: int
    """Documents longer than a sample whose end is left out."""
    too_long: int
    """Documents that are left out: within the length of a sample no token has a loss."""
    samples: int
    sequence_length: int
    reading: ReadingCounts

    @property
    def bad_lines(self) -> int:
        return self.reading.bad_lines

    @property
    def empty_answers(self) -> int:
        return self.reading.empty_answers

    @property
    def padding(self) -> float:
        """Share of the positions of all samples."""
        return 1 - self.tokens / (self.samples * self.sequence_length)

    def in_parts(self, parts: Sequence[DocumentCounts]) -> DocumentCounts:
        """Return the counts with the samples of the parts that the documents were divided into."""
        return replace(self, samples=sum(part.samples for part in parts))

    def summary(self) -> list[str]:
        """Return the counts as sentences; faults only where there are some."""
        lines = [
            f"data: {counted(self.documents, 'document')}, {counted(self.tokens, 'token')} "
            f"({self.trained_tokens:,} trained) in {counted(self.samples, 'sample')} of "
            f"{self.sequence_length:,}, {self.padding:.1%} padding"
        ]
        reading = self.reading
        faults = (
            (reading.bad_lines, "bad row", "left out"),
            (reading.nothing_to_train, "row", "left out: no token to train on"),
            (reading.empty_answers, "empty answer", "not trained"),
            (reading.without_stop, "answer", "without a stop token in the chat template"),
            (self.truncated, "document", "cut at the sequence length"),
            (self.too_long, "document", "left out: no answer within the sequence length"),
        )
        lines += [f"data: {counted(count, noun)} {what}" for count, noun, what in faults if count]
        return lines + [f"bad row: {message}" for message in reading.first_bad]
