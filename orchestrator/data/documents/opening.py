"""Opens data files as packed samples of tokens; they are tokenised once for all processes of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.data.documents.document_set import usable_documents
from orchestrator.data.documents.finding import find_row_files
from orchestrator.data.documents.fingerprint import fingerprint
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
    documents = PackedDocuments(usable_documents(store, options), options)
    for line in documents.counts.summary():
        note(line)
    return documents


def _check_vocabulary(store: TokenStore, options: DocumentOptions) -> None:
    if options.vocabulary is not None and store.largest_token >= options.vocabulary:
        raise UserError(
            f"the data has the token {store.largest_token}, but the model has embeddings for "
            f"{options.vocabulary} tokens (0 to {options.vocabulary - 1}); "
            "use the tokenizer of the model, or a model with a larger vocabulary"
        )
