"""Places documents in samples of one length.

A text is cut where a sample ends. A chat or a prompt with its completion stays whole.

Shapes: N documents, G segments, R samples (rows of a batch).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Documents, or parts of them, by their place in the store. The order is that of packing."""

    begin_N: np.ndarray
    length_N: np.ndarray

    def __len__(self) -> int:
        return len(self.begin_N)

    def take(self, index: np.ndarray) -> Pieces:
        return Pieces(self.begin_N[index], self.length_N[index])


@dataclass(frozen=True)
class SegmentLayout:
    """Segments of documents in the order of samples: sample r has those from ``first_R[r]`` on."""

    begin_G: np.ndarray
    """The place of each segment's first token in the store."""
    length_G: np.ndarray
    first_R: np.ndarray
    """One entry more than samples: the last one is the number of segments."""

    def __len__(self) -> int:
        return len(self.first_R) - 1

    def tokens(self) -> int:
        return int(self.length_G.sum())


def one_per_sample(pieces: Pieces) -> SegmentLayout:
    return SegmentLayout(pieces.begin_N, pieces.length_N, np.arange(len(pieces) + 1))


def cut(pieces: Pieces, sequence_length: int) -> Pieces:
    """Return the parts of documents that fit into a sample each; a document's last part may be short.

    A last part of one token is left out: no token follows it."""
    num_parts_N = -(-pieces.length_N // sequence_length)
    document_G = np.repeat(np.arange(len(pieces)), num_parts_N)
    offset_G = count_up(num_parts_N) * sequence_length
    length_G = np.minimum(pieces.length_N[document_G] - offset_G, sequence_length)
    is_kept_G = (length_G > 1) | (offset_G == 0)
    return Pieces(pieces.begin_N[document_G] + offset_G, length_G).take(np.flatnonzero(is_kept_G))


def joined(pieces: Pieces, sequence_length: int) -> SegmentLayout:
    """Join documents one after another, and cut them where a sample ends. The last sample may be short."""
    ends_N = np.cumsum(pieces.length_N)
    begins_N = ends_N - pieces.length_N
    # A segment begins where a document or a sample does.
    sample_begins = np.arange(0, ends_N[-1], sequence_length)
    begin_G = np.union1d(begins_N, sample_begins)
    length_G = np.diff(begin_G, append=ends_N[-1])
    document_G = np.searchsorted(ends_N, begin_G, side="right")
    place_G = pieces.begin_N[document_G] + begin_G - begins_N[document_G]
    first_R = np.append(np.searchsorted(begin_G, sample_begins), len(begin_G))
    return SegmentLayout(place_G, length_G, first_R)


def best_fit(pieces: Pieces, sequence_length: int) -> SegmentLayout:
    """Put each document, long ones first, into the sample where it leaves the least space.

    Documents of one length keep their order. None is longer than a sample."""
    order_N = np.argsort(-pieces.length_N, kind="stable")
    sample_N = np.empty(len(pieces), dtype=np.int64)
    num_samples = 0
    samples_by_space: dict[int, list[int]] = {}
    # The keys of samples_by_space, sorted: there are at most as many as a sample has tokens.
    spaces: list[int] = []
    for document, length in zip(order_N.tolist(), pieces.length_N[order_N].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place == len(spaces):
            sample = num_samples
            num_samples += 1
            left = sequence_length - length
        else:
            space = spaces[place]
            sample = samples_by_space[space].pop()
            if not samples_by_space[space]:
                del samples_by_space[space]
                del spaces[place]
            left = space - length
        sample_N[document] = sample
        if left:
            if left not in samples_by_space:
                samples_by_space[left] = []
                insort(spaces, left)
            samples_by_space[left].append(sample)
    by_sample_N = np.argsort(sample_N, kind="stable")
    first_R = np.searchsorted(sample_N[by_sample_N], np.arange(num_samples + 1))
    return SegmentLayout(pieces.begin_N[by_sample_N], pieces.length_N[by_sample_N], first_R)


def count_up(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, … for each count, one after another."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
