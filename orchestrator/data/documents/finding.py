"""Finds the files and data sets behind the entries of ``--data``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.data.documents.hub import (
    is_hub_name,
    is_saved_data_set,
    open_hub_data_set,
    open_saved_data_set,
)
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.rows import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    JsonFile,
    ParquetFile,
    RowFile,
    TextFile,
    TokenArrayFile,
)
from orchestrator.data.files import endings_text, find_data_files, is_pattern
from orchestrator.errors import UserError
from orchestrator.storage.address import as_url

_KINDS_OF_FOLDERS = ((*JSON_SUFFIXES, *PARQUET_SUFFIXES), TEXT_SUFFIXES, TOKEN_SUFFIXES)
_SUFFIXES = tuple(suffix for kind in _KINDS_OF_FOLDERS for suffix in kind)


def find_row_files(entries: Sequence[str], tokenizer: Any, options: DocumentOptions) -> list[RowFile]:
    """Return the files and data sets of entries in their order.

    Raises ``UserError`` for an entry without any.
    """
    if not entries:
        raise UserError("there is no data; give files, folders, addresses or a data set with --data")
    found: list[RowFile] = []
    for entry in map(str, entries):
        if is_saved_data_set(entry):
            found.append(open_saved_data_set(entry))
        elif _may_be_file(entry):
            found += [_row_file(file, tokenizer, options) for file in _find_files(entry)]
        else:
            found.append(open_hub_data_set(entry))
    return found


def _may_be_file(entry: str) -> bool:
    if as_url(entry) is not None or is_pattern(entry) or entry.endswith(_SUFFIXES):
        return True
    return Path(entry).expanduser().exists() or not is_hub_name(entry)


def _find_files(entry: str) -> list[str]:
    """Return the files of an entry. A folder's are of one kind: beside rows often lies a README.md."""
    files = find_data_files(entry, _SUFFIXES)
    if is_pattern(entry) or entry.endswith(_SUFFIXES):
        return files
    by_kind = ([file for file in files if file.endswith(kind)] for kind in _KINDS_OF_FOLDERS)
    return next((chosen for chosen in by_kind if chosen), files)


def _row_file(file: str, tokenizer: Any, options: DocumentOptions) -> RowFile:
    if file.endswith(JSON_SUFFIXES):
        return JsonFile(file)
    if file.endswith(PARQUET_SUFFIXES):
        return ParquetFile(file)
    if file.endswith(TEXT_SUFFIXES):
        return TextFile(file, options.text_column)
    if file.endswith(TOKEN_SUFFIXES):
        return TokenArrayFile(file, len(tokenizer))
    raise UserError(f"{file} is of no known kind; known endings: {endings_text(_SUFFIXES)}")
