"""Documents as samples of one length: tokens, labels, positions.

Shapes: B samples of a batch, S tokens of a sample, G segments of documents in the batch, F tokens of these
segments, N documents.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from orchestrator.data.documents.counts import DocumentCounts
from orchestrator.data.documents.document_set import DocumentSet, hold_out
from orchestrator.data.documents.kinds import CHAT, TEXT
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packing import SegmentLayout, best_fit, count_up, cut, joined, one_per_sample
from orchestrator.data.documents.store import TokenStore

NO_LABEL = -100
"""The label that ``cross_entropy`` of torch leaves out."""


class PackedDocuments:
    """Samples of documents, with random access. The tokens stay in a file that all processes map."""

    def __init__(self, documents: DocumentSet, options: DocumentOptions) -> None:
        self._documents = documents
        self._options = options
        self._layout = _lay_out(documents, options)

    def __len__(self) -> int:
        return len(self._layout)

    def gather(self, index_B: Tensor) -> dict[str, Tensor]:
        """Return ``input_ids``, ``labels``, ``position_ids`` and ``mask``, each [B, S].

        The label of a position is the next token of its document, or ``NO_LABEL``. Positions begin with 0 at
        each document and at each sample; those of padding go on, so that a sample of one document looks the
        same with and without padding. ``mask`` is 0 for padding.
        """
        samples_B = index_B.cpu().numpy()
        layout = self._layout
        first_B = layout.first_R[samples_B]
        num_segments_B = layout.first_R[samples_B + 1] - first_B
        segment_G = np.repeat(first_B, num_segments_B) + count_up(num_segments_B)
        length_G = layout.length_G[segment_G]
        sample_G = np.repeat(np.arange(len(samples_B)), num_segments_B)

        place_F = np.repeat(layout.begin_G[segment_G], length_G) + count_up(length_G)
        sample_F = np.repeat(sample_G, length_G)
        length_B = np.bincount(sample_G, weights=length_G, minlength=len(samples_B)).astype(np.int64)
        column_F = count_up(length_B)

        shape = (len(samples_B), self._options.sequence_length)
        input_ids_BS = np.zeros(shape, dtype=np.int64)
        input_ids_BS[sample_F, column_F] = self._store.tokens_at(place_F)
        has_label_F = self._store.trained_at(place_F + 1)
        labels_BS = np.full(shape, NO_LABEL, dtype=np.int64)
        labels_BS[sample_F, column_F] = np.where(has_label_F, self._store.tokens_at(place_F + 1), NO_LABEL)
        mask_BS = np.arange(shape[1]) < length_B[:, None]
        arrays = {
            "input_ids": input_ids_BS,
            "labels": labels_BS,
            "position_ids": _positions(sample_G, length_G, shape),
            "mask": mask_BS.astype(np.int64),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def to(self, device: torch.device) -> PackedDocuments:
        """Return the same: the tokens may be more than a device holds."""
        del device
        return self

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def is_text(self) -> bool:
        """Whether the documents are texts that are trained as a whole, not chats or completions."""
        return self._store.kind == TEXT

    @property
    def is_chat(self) -> bool:
        """Whether the chat template wrote the documents."""
        return self._store.kind == CHAT

    @property
    def _store(self) -> TokenStore:
        return self._documents.store

    @cached_property
    def counts(self) -> DocumentCounts:
        documents = self._documents
        return DocumentCounts(
            documents=len(documents.pieces),
            tokens=self._layout.tokens(),
            trained_tokens=int(documents.trained_N.sum()),
            truncated=int(documents.is_truncated_N.sum()),
            too_long=documents.too_long,
            samples=len(self),
            sequence_length=self._options.sequence_length,
            reading=self._store.counts,
        )

    def held_out(self, share: float) -> tuple[PackedDocuments, PackedDocuments]:
        """Return samples for training and for validation, of disjoint documents.

        The seed chooses the documents of the second. Raises ``UserError`` if there are too few."""
        kept, held_out = hold_out(self._documents, share, self._options.seed)
        return PackedDocuments(kept, self._options), PackedDocuments(held_out, self._options)


def _lay_out(documents: DocumentSet, options: DocumentOptions) -> SegmentLayout:
    if not options.packing:
        return one_per_sample(cut(documents.pieces, options.sequence_length))
    pack = joined if documents.store.kind == TEXT else best_fit
    return pack(documents.pieces, options.sequence_length)


def _positions(sample_G: np.ndarray, length_G: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return positions that begin anew at each segment."""
    begin_G = _first_columns(sample_G, length_G)
    segment_begins_BS = np.zeros(shape, dtype=np.int64)
    segment_begins_BS[sample_G, begin_G] = begin_G
    return np.arange(shape[1]) - np.maximum.accumulate(segment_begins_BS, axis=1)


def _first_columns(sample_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
    """Return the column at which each segment begins in its sample."""
    end_G = np.cumsum(length_G)
    begin_G = end_G - length_G
    is_first_G = np.diff(sample_G, prepend=-1) != 0
    return begin_G - begin_G[is_first_G][sample_G]
