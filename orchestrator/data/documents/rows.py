"""Rows of data files of any kind, in the order of the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.files import data_file_size, data_file_version, open_data_file
from orchestrator.data.json_lines import JsonLines
from orchestrator.data.parquet import ParquetRows
from orchestrator.errors import UserError

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")
PARQUET_SUFFIXES = (".parquet",)
TEXT_SUFFIXES = (".txt", ".md", ".txt.gz", ".md.gz")
TOKEN_SUFFIXES = (".bin", ".npy")
_LINES_AT_ONCE = 1000


@dataclass(frozen=True)
class Row:
    """A value of a file, and where it stands."""

    place: str
    """Names the row in messages: the file and the line."""
    value: Any
    size: float
    """Its share of the ``size`` of the file."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read."""

    message: str
    size: float


class RowFile(ABC):
    """A file of rows, or a data set that has rows."""

    size: float
    """Of what is to be read, for progress."""

    @abstractmethod
    def version(self) -> Sequence[str]:
        """Return texts that change with the content."""

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]: ...


class DataFile(RowFile):
    def __init__(self, file: str) -> None:
        self.file = file
        self.size = data_file_size(file)

    def version(self) -> Sequence[str]:
        return self.file, data_file_version(self.file)


class JsonFile(DataFile):
    """A file with one JSON value a line."""

    def rows(self) -> Iterator[Row | BadRow]:
        source = JsonLines(self.file)
        reader = source.read(0)
        is_packed = self.file.endswith(".gz")
        while lines := reader.take(_LINES_AT_ONCE):
            for line in lines:
                size = 0 if is_packed else len(line.text)
                try:
                    value = source.decode(line)
                except UserError as error:
                    yield BadRow(str(error), size)
                else:
                    yield Row(f"{line.file}, line {line.number}", value, size)


class ParquetFile(DataFile):
    def rows(self) -> Iterator[Row | BadRow]:
        source = ParquetRows(self.file)
        size = self.size / max(len(source), 1)
        for number, value in enumerate(source.in_order(), 1):
            yield Row(f"{self.file}, row {number}", value, size)


class TextFile(DataFile):
    """A file of plain text: one document."""

    def __init__(self, file: str, text_column: str) -> None:
        super().__init__(file)
        self._text_column = text_column

    def rows(self) -> Iterator[Row | BadRow]:
        try:
            with open_data_file(self.file) as opened:
                text = opened.read().decode()
        except UnicodeDecodeError as error:
            yield BadRow(f"{self.file} is not text in UTF-8 ({error}); convert or remove it", self.size)
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read {self.file}: {error}") from None
        else:
            yield Row(self.file, {self._text_column: text}, self.size)
