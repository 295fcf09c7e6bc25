"""Finds the files of ``--data`` and opens them as packed samples of tokens.

They are tokenised once for all processes of a machine, under a key that changes with the files, the tokenizer
and the options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.data.documents.counts import DocumentCounts
from orchestrator.data.documents.document_set import usable_documents
from orchestrator.data.documents.hub import (
    is_hub_name,
    is_saved_data_set,
    open_hub_data_set,
    open_saved_data_set,
)
from orchestrator.data.documents.mixture import MixedDocuments
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packed import PackedDocuments
from orchestrator.data.documents.reading import DocumentReader
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
from orchestrator.data.documents.store import TokenStore, is_whole
from orchestrator.data.files import endings_text, find_data_files, is_pattern
from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.cache import cached_folder


def open_documents(
    files: Sequence[str], tokenizer: Any, options: DocumentOptions, note: Callable[[str], None]
) -> PackedDocuments:
    """Return the samples of files, of a folder of ``datasets`` or of a data set on the hub.

    ``tokenizer`` is one of ``transformers``. ``note`` shows progress and counts. Raises ``UserError`` for
    files, rows or a tokenizer that cannot be used.
    """
    documents = _open(files, tokenizer, options, note)
    _tell(documents.counts, note)
    return documents


def open_divided(
    files: Sequence[str],
    tokenizer: Any,
    options: DocumentOptions,
    note: Callable[[str], None],
    held_out: float,
) -> tuple[PackedDocuments, PackedDocuments]:
    """Return samples for training and for validation, of disjoint documents: a share is held out."""
    documents = _open(files, tokenizer, options, note)
    parts = documents.held_out(held_out)
    _tell(documents.counts.in_parts([part.counts for part in parts]), note)
    return parts


def open_mixture(
    weights: Mapping[str, float],
    tokenizer: Any,
    options: DocumentOptions,
    note: Callable[[str], None],
    held_out: float,
) -> tuple[MixedDocuments, MixedDocuments | None]:
    """Return samples of several entries for training, in the shares of their weights, and for validation.

    ``held_out`` is a share of the documents of each entry; 0 holds out none."""
    parts: list[PackedDocuments] = []
    held: list[PackedDocuments] = []
    for entry in weights:
        note_entry = partial(_note_entry, note, entry)
        if held_out:
            part, held_part = open_divided([entry], tokenizer, options, note_entry, held_out)
            held.append(held_part)
        else:
            part = open_documents([entry], tokenizer, options, note_entry)
        parts.append(part)
    mixed = MixedDocuments(parts, list(weights.values()))
    for line in mixed.summary(list(weights)):
        note(line)
    # Held-out samples are all evaluated, once each: their weights mean nothing.
    return mixed, MixedDocuments(held, [1.0] * len(held)) if held else None


def _note_entry(note: Callable[[str], None], entry: str, message: str) -> None:
    note(f"{entry}: {message}")


def _open(
    files: Sequence[str], tokenizer: Any, options: DocumentOptions, note: Callable[[str], None]
) -> PackedDocuments:
    row_files = find_row_files(files, tokenizer, options)
    reader = DocumentReader(tokenizer, options, note)

    def write(folder: Path) -> None:
        reader.write(row_files, folder)

    key = fingerprint(row_files, tokenizer, options)
    folder = cached_folder(
        key,
        write,
        is_whole=is_whole,
        on_wait=lambda: note("waiting for another process that tokenises the same data"),
    )
    store = TokenStore(folder)
    _check_vocabulary(store, options)
    return PackedDocuments(usable_documents(store, options), options)


def _tell(counts: DocumentCounts, note: Callable[[str], None]) -> None:
    for line in counts.summary():
        note(line)


def _check_vocabulary(store: TokenStore, options: DocumentOptions) -> None:
    if options.vocabulary is not None and store.largest_token >= options.vocabulary:
        raise UserError(
            f"the data has the token {store.largest_token}, but the model has embeddings for "
            f"{options.vocabulary} tokens (0 to {options.vocabulary - 1}); "
            "use the tokenizer of the model, or a model with a larger vocabulary"
        )


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


_FORMAT = 2
"""Raise this when the same rows become other tokens, masks or files."""


def fingerprint(files: Sequence[RowFile], tokenizer: Any, options: DocumentOptions) -> str:
    """Return the key. Length, packing and seed are not part of it: samples are laid out at each start."""
    facts = {
        "format": _FORMAT,
        "files": [list(file.version()) for file in files],
        "tokenizer": _tokenizer_facts(tokenizer),
        "options": [options.train_on, options.text_column, options.skip_bad],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Calls of the tokenizer change these two; they are set anew by each call.
        model = {
            key: value
            for key, value in json.loads(backend.to_str()).items()
            if key not in ("truncation", "padding")
        }
    else:
        model = {"vocabulary": tokenizer.get_vocab(), "settings": getattr(tokenizer, "init_kwargs", {})}
    return {
        "model": model,
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
    }
