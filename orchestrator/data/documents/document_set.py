"""The documents that samples are made of: which ones, in which order, and how much of the long ones.

Shapes: N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.data.documents.kinds import TEXT
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packing import Pieces
from orchestrator.data.documents.store import TokenStore
from orchestrator.errors import UserError

_HOLD_OUT = 1
"""Keeps the choice of held-out documents apart from the order of packing."""


@dataclass(frozen=True)
class DocumentSet:
    """Documents of a store, with what happened to the long ones."""

    store: TokenStore
    pieces: Pieces
    trained_N: np.ndarray
    is_truncated_N: np.ndarray
    too_long: int

    def take(self, index: np.ndarray) -> DocumentSet:
        pieces = self.pieces.take(index)
        trained_N = self.trained_N[index]
        return DocumentSet(self.store, pieces, trained_N, self.is_truncated_N[index], self.too_long)


def usable_documents(store: TokenStore, options: DocumentOptions) -> DocumentSet:
    """Return the documents of a store in the order of the seed.

    Chats and completions that are longer than a sample are cut, or left out if no answer remains."""
    num_documents = len(store.offsets_N) - 1
    order_N = np.random.default_rng(options.seed).permutation(num_documents)
    begin_N = np.asarray(store.offsets_N)[:-1][order_N]
    length_N = np.diff(store.offsets_N)[order_N]
    trained_N = np.asarray(store.trained_N)[order_N].astype(np.int64)
    is_truncated_N = length_N > options.sequence_length
    if store.kind == TEXT:
        is_truncated_N[:] = False
    for document in np.flatnonzero(is_truncated_N):
        begin = int(begin_N[document])
        length_N[document] = options.sequence_length
        # The token after the last one that fits is still the label of that one.
        trained_N[document] = store.trained_between(begin, begin + options.sequence_length + 1)
    whole = DocumentSet(store, Pieces(begin_N, length_N), trained_N, is_truncated_N, 0)
    kept_N = np.flatnonzero(trained_N > 0)
    kept = whole.take(kept_N)
    if not len(kept_N):
        raise UserError(
            f"none of the {num_documents:,} documents has a token to train on within the sequence length "
            f"{options.sequence_length}; raise --sequence-length"
        )
    return DocumentSet(store, kept.pieces, kept.trained_N, kept.is_truncated_N, num_documents - len(kept_N))


def hold_out(documents: DocumentSet, share: float, seed: int) -> tuple[DocumentSet, DocumentSet]:
    """Return documents for training and for validation: a share of them, chosen by the seed.

    The end of a single text is held out. Raises ``UserError`` if there is nothing to divide.
    """
    if not 0 < share < 1:
        raise UserError(f"the share of held-out documents is {share}; more than 0 and less than 1 was needed")
    num_documents = len(documents.pieces)
    if num_documents == 1:
        return _divide_text(documents, share)
    num_held_out = min(max(round(share * num_documents), 1), num_documents - 1)
    order_N = np.random.default_rng([seed, _HOLD_OUT]).permutation(num_documents)
    kept_N = np.sort(order_N[num_held_out:])
    held_out_N = np.sort(order_N[:num_held_out])
    return documents.take(kept_N), documents.take(held_out_N)


def _divide_text(documents: DocumentSet, share: float) -> tuple[DocumentSet, DocumentSet]:
    """Divide the only document, a text, at a place; its end is for validation."""
    begin = int(documents.pieces.begin_N[0])
    length = int(documents.pieces.length_N[0])
    num_held_out = max(round(share * length), 2)
    num_kept = length - num_held_out
    if documents.store.kind != TEXT or num_kept < 3:
        raise UserError(
            "there is one document to train on, and none to hold out; "
            "give more documents, or --validation-data"
        )
    # The label of the first part's last token is a token of its own: one token less is read.
    kept = _part_of_text(documents, begin, num_kept - 1)
    return kept, _part_of_text(documents, begin + num_kept, num_held_out)


def _part_of_text(documents: DocumentSet, begin: int, length: int) -> DocumentSet:
    trained = documents.store.trained_between(begin + 1, begin + length + 1)
    pieces = Pieces(np.array([begin]), np.array([length]))
    return DocumentSet(documents.store, pieces, np.array([trained]), np.array([False]), 0)
