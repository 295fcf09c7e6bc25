"""Opens data files as packed samples of tokens; they are tokenised once for all processes of a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.data.documents.counts import DocumentCounts
from orchestrator.data.documents.document_set import usable_documents
from orchestrator.data.documents.finding import find_row_files
from orchestrator.data.documents.fingerprint import fingerprint
from orchestrator.data.documents.mixture import MixedDocuments
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packed import PackedDocuments
from orchestrator.data.documents.reading import DocumentReader
from orchestrator.data.documents.store import TokenStore, is_whole
from orchestrator.errors import UserError
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
