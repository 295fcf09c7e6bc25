"""Which point of a finite space promises most, from the trials so far: for searches of few trials, which are over before a sampler
that begins at random has learnt anything. Free of Ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.space import Space, Values

Floats = NDArray[np.floating[Any]]

_DRAWS, _KEPT = 64, 8  # guesses at how settings matter, and the best of them that are asked
_SPREAD = 1.5  # of their logits
_NOISE = (0.02, 0.3)  # of a trial, as a part of how far scores lie apart
_TRUST = 2  # trials that the spread of all scores counts for, beside each guess's own
_CANDIDATES = 2000  # points that are looked at in a large space


@dataclass(frozen=True)
class _Guess:
    """How settings may matter: the logarithm of the correlation between the two ends of each, and the noise."""

    ends: Floats
    noise: float

    def alike(self, apart: Floats) -> Floats:
        """The correlation of points that lie ``apart`` in each setting: a product, so that what a setting does may depend on others."""
        return np.exp(np.tensordot(self.ends, apart, 1))

    def root(self, apart: Floats) -> Floats:
        return np.linalg.cholesky(self.alike(apart) + self.noise**2 * np.eye(apart.shape[1]))


@dataclass(frozen=True)
class _Told:
    """A guess after the trials: how well it explains them, and what it expects elsewhere."""

    guess: _Guess
    evidence: float
    root: Floats
    rest: Floats
    mean: float
    variance: float

    @classmethod
    def of(cls, guess: _Guess, apart: Floats, scores: Floats) -> _Told:
        root, mean, count = guess.root(apart), float(scores.mean()), len(scores) + _TRUST
        rest = np.linalg.solve(root, scores - mean)
        variance = float(rest @ rest + _TRUST * (scores.var() or 1.0)) / count
        return cls(guess, -count / 2 * math.log(variance) - float(np.log(np.diag(root)).sum()), root, rest, mean, variance)


class Surrogate:
    """A Gaussian process over the points of a space, whose hyperparameters are not fitted, which takes more trials than there are, but
    drawn once and weighed by how well they explain the trials. The logarithm of a score is modelled: settings multiply throughput."""

    def __init__(self, space: Space, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        lists = [domain.values for domain in space.domains.values() if isinstance(domain, Values)]
        self._words = np.array([not _ordered(values) for values in lists])
        places = [_places(values) for values in lists]
        self._at = np.array(
            [[place[str(point[name])] for name, place in zip(space.domains, places, strict=True)] for point in space.grid()]
        )
        logits = _SPREAD * self._chance.standard_normal((_DRAWS, len(lists)))
        noise = np.exp(self._chance.uniform(math.log(_NOISE[0]), math.log(_NOISE[1]), _DRAWS))
        self._guesses = [_Guess(-np.log1p(np.exp(-each)), float(part)) for each, part in zip(logits, noise, strict=True)]

    def best(self, scores: Mapping[int, float | None], waiting: Collection[int]) -> int | None:
        """The number of the point to try next; None where all were tried. ``scores`` are the larger the better, and None of points
        that failed; ``waiting`` are under way."""
        left = np.setdiff1d(np.arange(len(self._at)), [*scores, *waiting])
        if not left.size:
            return None
        left = self._chance.permutation(left)[:_CANDIDATES]
        if all(score is None for score in scores.values()):  # nothing is known: far away from what was tried
            tried = [*scores, *waiting]
            return int(left[np.argmax(self._apart(left, tried).sum(0).min(1))] if tried else left[0])
        gains = sum(weight * gain for weight, gain in self._gains(left, scores, waiting))
        return int(left[np.argmax(gains)])

    def _gains(self, left: Floats, scores: Mapping[int, float | None], waiting: Collection[int]) -> Iterator[tuple[float, Floats]]:
        """The expected improvement of each point that is left, by each of the best guesses, and the weight of that guess."""
        seen, values = list(scores), _logarithms(list(scores.values()))
        told = [_Told.of(guess, self._apart(seen, seen), values) for guess in self._guesses]
        told = sorted(told, key=lambda one: -one.evidence)[:_KEPT]
        to_seen, all_tried = self._apart(left, seen), [*seen, *waiting]
        to_all, among_all = self._apart(left, all_tried), self._apart(all_tried, all_tried)
        for one in told:
            mean = one.mean + np.linalg.solve(one.root, one.guess.alike(to_seen).T).T @ one.rest
            # a trial under way will tell what is expected of it, as far as one knows: it changes no mean, but what is uncertain
            known = np.linalg.solve(one.guess.root(among_all), one.guess.alike(to_all).T)
            deviation = np.sqrt(one.variance * np.maximum(1 - (known**2).sum(0), 1e-12))
            yield math.exp(one.evidence - told[0].evidence), _improvement(mean - values.max(), deviation)

    def _apart(self, rows: Any, columns: Any) -> Floats:
        """How far points lie apart in each setting, from 0 to 1."""
        difference = np.abs(self._at[rows][:, None] - self._at[columns][None]).transpose(2, 0, 1)
        return np.where(self._words[:, None, None], difference > 0, difference)


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
    below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in ratio])
    return deviation * (ratio * below + np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi))
