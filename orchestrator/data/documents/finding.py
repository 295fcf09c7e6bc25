"""Finds the files and data sets behind the entries of ``--data``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.rows import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    JsonFile,
    ParquetFile,
    RowFile,
    TextFile,
)
from orchestrator.data.files import find_data_files
from orchestrator.errors import UserError

_SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)


def find_row_files(entries: Sequence[str], tokenizer: Any, options: DocumentOptions) -> list[RowFile]:
    """Return the files of entries in their order. Raises ``UserError`` for an entry without any."""
    del tokenizer
    return [_row_file(file, options) for file in find_data_files(entries, _SUFFIXES)]


def _row_file(file: str, options: DocumentOptions) -> RowFile:
    if file.endswith(JSON_SUFFIXES):
        return JsonFile(file)
    if file.endswith(PARQUET_SUFFIXES):
        return ParquetFile(file)
    if file.endswith(TEXT_SUFFIXES):
        return TextFile(file, options.text_column)
    raise UserError(f"{file} is of no known kind; known: {', '.join(_SUFFIXES)}")
