"""Several data sets as one, in given shares: each epoch takes so many samples of each.

A sample is a packed sequence of one data set. All have the same number of tokens, so that a share of samples
is the same share of the computed tokens; a share of documents would depend on their lengths.

Shapes: B samples of a batch, P data sets, E samples of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orchestrator.data.documents.packed import PackedDocuments


class MixedDocuments:
    """Samples of several data sets, one after another; ``epoch_samples`` chooses those of an epoch.

    An epoch has as many samples as all data sets together, whatever their weights."""

    def __init__(self, parts: Sequence[PackedDocuments], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self._ends_P = np.cumsum([len(part) for part in parts])
        self.counts = divide(len(self), weights)
        """Samples of each data set in an epoch."""

    def __len__(self) -> int:
        return int(self._ends_P[-1])

    def epoch_samples(self, seed: int, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples, in no particular order.

        An epoch goes on in each data set where the epoch before has stopped, and begins it again, in another
        order, when it is used up. So the samples of a data set are used equally often, or once more."""
        chosen = []
        for number, (part, count) in enumerate(zip(self._parts, self.counts, strict=True)):
            begin = int(self._ends_P[number]) - len(part)
            chosen.append(begin + _pass_samples(len(part), epoch * count, count, (seed, number)))
        return torch.from_numpy(np.concatenate(chosen))

    def gather(self, index_B: Tensor) -> dict[str, Tensor]:
        """Return what ``PackedDocuments.gather`` does, for samples of any of the data sets."""
        samples_B = index_B.cpu().numpy()
        part_B = np.searchsorted(self._ends_P, samples_B, side="right")
        places = []
        batches = []
        for number in np.unique(part_B):
            part = self._parts[number]
            place = np.flatnonzero(part_B == number)
            own = samples_B[place] - (self._ends_P[number] - len(part))
            places.append(place)
            batches.append(part.gather(torch.from_numpy(own)))
        order_B = torch.from_numpy(np.argsort(np.concatenate(places)))
        return {name: torch.cat([batch[name] for batch in batches])[order_B] for name in batches[0]}

    def to(self, device: torch.device) -> MixedDocuments:
        """Return the same: the tokens may be more than a device holds."""
        del device
        return self

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def is_text(self) -> bool:
        """Whether all documents are texts."""
        return all(part.is_text for part in self._parts)

    @property
    def is_chat(self) -> bool:
        """Whether the chat template wrote some of the documents."""
        return any(part.is_chat for part in self._parts)

    def summary(self, names: Sequence[str]) -> list[str]:
        """Return a sentence about each data set's part of an epoch."""
        rows = zip(names, self._parts, self.counts, strict=True)
        return [
            f"mixture: {name}: {count:,} of {len(self):,} samples of an epoch ({count / len(self):.1%}), "
            f"{count / len(part):.2g} times its {len(part):,}"
            for name, part, count in rows
        ]


def divide(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to weights that add up to ``total``: each is exact to one.

    The largest fractions are rounded up; among equal ones the first."""
    exact_P = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    counts_P = np.floor(exact_P).astype(np.int64)
    missing = total - int(counts_P.sum())
    by_fraction_P = np.argsort(counts_P - exact_P, kind="stable")
    counts_P[by_fraction_P[:missing]] += 1
    return counts_P.tolist()


def _pass_samples(num_samples: int, begin: int, count: int, seed: tuple[int, int]) -> np.ndarray:
    """Return ``count`` samples from a place on in an endless sequence of passes, each in its own order."""
    first = begin // num_samples
    last = (begin + max(count, 1) - 1) // num_samples
    passes = [
        np.random.default_rng([*seed, number]).permutation(num_samples) for number in range(first, last + 1)
    ]
    offset = begin - first * num_samples
    return np.concatenate(passes)[offset : offset + count]
