"""Rows of data files of any kind, in the order of the files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.files import data_file_size, data_file_version, map_tokens, open_data_file
from orchestrator.data.json_lines import JsonLines
from orchestrator.data.parquet import ParquetRows
from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.local_copy import local_copy

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")
PARQUET_SUFFIXES = (".parquet",)
TEXT_SUFFIXES = (".txt", ".md", ".txt.gz", ".md.gz")
TOKEN_SUFFIXES = (".bin", ".npy")
_LINES_AT_ONCE = 1000
_BYTES_LOOKED_AT = 4096
_TOKENS_LOOKED_AT = 4096


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
    """The amount to be read, for progress."""

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
    """A file with one JSON value a line, or with a list of values."""

    def rows(self) -> Iterator[Row | BadRow]:
        return self._list() if self._begins_with_list() else self._lines()

    def _begins_with_list(self) -> bool:
        with open_data_file(self.file) as opened, _told_errors(self.file):
            return opened.read(_BYTES_LOOKED_AT).lstrip().startswith(b"[")

    def _list(self) -> Iterator[Row | BadRow]:
        try:
            with open_data_file(self.file) as opened, _told_errors(self.file):
                values = json.loads(opened.read())
        except ValueError as error:
            raise UserError(f"{self.file} begins as a list, but is not JSON: {error}") from None
        for number, value in enumerate(values, 1):
            yield Row(f"{self.file}, entry {number}", value, self.size / len(values))

    def _lines(self) -> Iterator[Row | BadRow]:
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
        with open_data_file(self.file) as opened, _told_errors(self.file):
            content = opened.read()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            yield BadRow(f"{self.file} is not text in UTF-8 ({error}); convert or remove it", self.size)
        else:
            yield Row(self.file, {self._text_column: text}, self.size)


class TokenArrayFile(DataFile):
    """A file of tokens. A remote one is copied to this machine first."""

    def __init__(self, file: str, vocabulary: int) -> None:
        super().__init__(file)
        self._dtype = "uint16" if vocabulary <= 2**16 else "uint32"

    def rows(self) -> Iterator[Row | BadRow]:
        location = self.file if as_url(self.file) is None else local_copy("the token file", self.file)
        tokens_T = map_tokens(Path(location), self._dtype)
        if tokens_T.dtype == np.uint16 and len(tokens_T) > 1 and not tokens_T[1:_TOKENS_LOOKED_AT:2].any():
            raise UserError(
                f"{self.file} was read as uint16, as the tokenizer's vocabulary fits, but every second "
                "number is 0: it seems to hold uint32; save it as .npy, which tells its type"
            )
        yield Row(self.file, tokens_T, self.size)


@contextmanager
def _told_errors(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
