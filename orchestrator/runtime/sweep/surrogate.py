"""Which point of a finite space promises most, from the trials so far: for searches of few trials, which are over before a sampler
that begins at random has learnt anything. Free of Ray.

Letters of shapes: G guesses, S settings, R rows and C columns of points, L points that are left, T points that were tried."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.space import Space, Values

Floats = NDArray[np.floating[Any]]
Numbers = Sequence[int] | NDArray[np.integer[Any]]

_DRAWS, _KEPT = 64, 8  # guesses at how settings matter, and the best of them that are asked
_SPREAD = 1.5  # of the logits of their correlations
_NOISE = (0.02, 0.3)  # of a trial, as a part of how far scores lie apart
_TRUST = 2  # trials that the spread of all scores counts for, beside what each guess makes of them
_CANDIDATES = 2000  # points that are looked at in a large space
_TRIED = 256  # trials that are learnt from: memory grows with their square


class Surrogate:
    """A Gaussian process over the points of a space. Its hyperparameters are not fitted, for which there are too few trials, but
    guessed many times and weighed by how well each guess explains the trials. The correlation of two points is a product over the
    settings they differ in, so that what a setting does may depend on the others; it is the logarithm of a score that is modelled, for
    settings multiply throughput."""

    def __init__(self, space: Space, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        lists = [domain.values for domain in space.domains.values() if isinstance(domain, Values)]
        places = [_places(values) for values in lists]
        points = [
            [place[str(point[name])] for name, place in zip(space.domains, places, strict=True)]
            for point in space.grid()
        ]
        self._at, self._words_S = np.array(points), np.array([not _ordered(values) for values in lists])
        logits_GS = _SPREAD * self._chance.standard_normal((_DRAWS, len(lists)))
        self._logs_GS = -np.log1p(np.exp(-logits_GS))  # of the correlation between the ends of each setting
        self._noise_G = np.exp(self._chance.uniform(math.log(_NOISE[0]), math.log(_NOISE[1]), _DRAWS))

    def best(self, scores: Mapping[int, float | None], waiting: Collection[int]) -> int | None:
        """The number of the point to try next; None where all were tried. ``scores`` are the larger the better, and None of points
        that failed; ``waiting`` are under way."""
        left = np.setdiff1d(np.arange(len(self._at)), [*scores, *waiting])
        if not left.size:
            return None
        left = self._chance.permutation(left)[:_CANDIDATES]
        scores = _telling(scores)
        tried = [*scores, *waiting]
        if not tried:
            return int(left[0])
        if all(score is None for score in scores.values()):  # nothing is known: far away from what was tried
            return int(left[np.argmax(self._apart(left, tried).sum(0).min(1))])
        return int(left[np.argmax(self._gains(left, scores, tried))])

    def _gains(self, left: Numbers, scores: Mapping[int, float | None], tried: Numbers) -> Floats:
        """The improvement that is expected of each point that is left."""
        seen, values_T = list(scores), _logarithms(list(scores.values()))
        mean, count, every = values_T.mean(), len(seen) + _TRUST, np.arange(_DRAWS)
        root_GTT = self._root(seen, every)
        rest_GT = np.linalg.solve(
            root_GTT, np.broadcast_to((values_T - mean)[:, None], (_DRAWS, len(seen), 1))
        )[..., 0]
        variance_G = ((rest_GT**2).sum(1) + _TRUST * (values_T.var() or 1.0)) / count
        evidence_G = -count / 2 * np.log(variance_G) - np.log(np.diagonal(root_GTT, axis1=1, axis2=2)).sum(1)
        kept = np.argsort(-evidence_G)[:_KEPT]
        means_GL = mean + (
            np.linalg.solve(root_GTT[kept], self._alike(seen, left, kept)) * rest_GT[kept][..., None]
        ).sum(1)
        # a trial under way will tell what is expected of it, as far as one knows: it changes no mean, but what is uncertain
        known_GTL = np.linalg.solve(self._root(tried, kept), self._alike(tried, left, kept))
        deviation_GL = np.sqrt(variance_G[kept][:, None] * np.maximum(1 - (known_GTL**2).sum(1), 1e-12))
        return np.exp(evidence_G[kept] - evidence_G[kept[0]]) @ _improvement(
            means_GL - values_T.max(), deviation_GL
        )

    def _root(self, points: Numbers, guesses: Numbers) -> Floats:
        """The Cholesky factor of the covariance of what trials of these points say, but for its scale."""
        return np.linalg.cholesky(
            self._alike(points, points, guesses)
            + self._noise_G[guesses][:, None, None] ** 2 * np.eye(len(points))
        )

    def _alike(self, rows: Numbers, columns: Numbers, guesses: Numbers) -> Floats:
        """The correlation of points by each of the guesses."""
        return np.exp(np.tensordot(self._logs_GS[guesses], self._apart(rows, columns), 1))

    def _apart(self, rows: Numbers, columns: Numbers) -> Floats:
        """How far points lie apart in each setting, from 0 to 1."""
        difference_SRC = np.abs(self._at[rows][:, None] - self._at[columns][None]).transpose(2, 0, 1)
        return np.where(self._words_S[:, None, None], difference_SRC > 0, difference_SRC)


def _telling(scores: Mapping[int, float | None]) -> Mapping[int, float | None]:
    """Of many trials the latest, and the best of those before."""
    if len(scores) <= _TRIED:
        return scores
    told, half = list(scores.items()), _TRIED // 2
    best = sorted(told[:-half], key=lambda entry: -math.inf if entry[1] is None else entry[1], reverse=True)[
        :half
    ]
    return dict([*best, *told[-half:]])


def _ordered(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _places(values: Sequence[Any]) -> dict[str, float]:
    """The place of each value among the others, from 0 to 1; numbers by their order."""
    ordered = sorted(values) if _ordered(values) else values
    return {str(value): place / max(1, len(values) - 1) for place, value in enumerate(ordered)}


def _logarithms(scores: Sequence[float | None]) -> Floats:
    """Scores of one sign as the logarithm of their size; what failed is no better than the worst."""
    worst = min(score for score in scores if score is not None)
    filled = np.array([worst if score is None else score for score in scores])
    if worst > 0:
        return np.log(filled)
    return -np.log(-filled) if filled.max() < 0 else filled


def _improvement(above: Floats, deviation: Floats) -> Floats:
    """By how much a normal variable exceeds 0 on average, of which the mean and the deviation are given."""
    ratio = above / deviation
    below = 0.5 * np.vectorize(math.erfc)(-ratio / math.sqrt(2))
    return deviation * (ratio * below + np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi))
