"""Points that Optuna suggests, from the scores of earlier trials.

Spaces of lists use Optuna's Gaussian process (``GPSampler``), other spaces its tree of Parzen
estimators (``TPESampler``). ``benchmarks/LOG.md`` compares them.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from orchestrator.config.sweep.space import MAX_POINTS, Point, Space, Values, is_number, point_key
from orchestrator.errors import UserError

_STARTUP_TRIALS = 4
"""Trials before a sampler uses its model; with fewer the model has nothing to compare, with more
a short search is random."""
_MAX_REPEATED = 3
"""Tried points that a sampler of a listed space may suggest in a row, before a random new point is taken."""


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "--search optuna needs Optuna: pip install 'expert-orchestrator[optuna]'; or use --search random"
        ) from None
    return optuna


class OptunaSource:
    """Points that Optuna's samplers suggest; the points ``first`` come before them.

    Samplers suggest tried points again, above all in small spaces. In a listed space such a
    suggestion is replaced by a random new point, and the source ends when all points were tried.
    """

    def __init__(self, space: Space, seed: int, first: Iterable[Point]) -> None:
        self._optuna = import_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._space = space
        self._random = random.Random(seed)
        listed = space.listed and space.size <= MAX_POINTS
        self._untried = {point_key(point): point for point in space.grid()} if listed else None
        self._choices = {
            name: _choices(domain, ordered=listed)
            for name, domain in space.domains.items()
            if isinstance(domain, Values)
        }
        self._distributions = {name: self._distribution(name, listed) for name in space.domains}
        self._study = self._optuna.create_study(direction="maximize", sampler=self._sampler(seed, listed))
        self._first = list(first)
        self._running: dict[str, list[Any]] = {}
        self._values: dict[str, float] = {}
        self._worst: float | None = None

    def _sampler(self, seed: int, listed: bool) -> Any:
        samplers = self._optuna.samplers
        if not listed:
            return samplers.TPESampler(
                seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True, constant_liar=True
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls the sampler experimental
            return samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)

    def _distribution(self, name: str, listed: bool) -> Any:
        kinds = self._optuna.distributions
        domain = self._space.domains[name]
        if isinstance(domain, Values):
            # By index, because a value may be a tuple or None.
            indices = list(range(len(domain.values)))
            if listed and all(map(is_number, domain.values)):
                return kinds.IntDistribution(0, indices[-1])
            return kinds.CategoricalDistribution(indices)
        if domain.integer:
            return kinds.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
        return kinds.FloatDistribution(domain.low, domain.high, log=domain.log)

    def _encode(self, point: Point) -> dict[str, Any]:
        """Return a point as Optuna's parameters."""
        return {
            name: self._choices[name].index(point[name]) if name in self._choices else point[name]
            for name in self._space.domains
        }

    def _decode(self, parameters: dict[str, Any]) -> Point:
        return {
            name: self._choices[name][parameters[name]] if name in self._choices else parameters[name]
            for name in self._space.domains
        }

    def ask(self) -> Point | None:
        if self._first:
            return self._start(self._enqueued(self._first.pop(0)))
        if self._untried is None:
            return self._start(self._study.ask(self._distributions))
        if not self._untried:
            return None
        for _ in range(_MAX_REPEATED):
            trial = self._study.ask(self._distributions)
            key = point_key(self._decode(trial.params))
            if key in self._untried:
                return self._start(trial)
            # Repeat the known score: the sampler becomes surer of this point, and suggests others.
            self._finish(trial, self._values.get(key))
        return self._start(self._enqueued(self._random.choice(list(self._untried.values()))))

    def _enqueued(self, point: Point) -> Any:
        """Return an Optuna trial of a point of ours."""
        self._study.enqueue_trial(self._encode(point))
        return self._study.ask(self._distributions)

    def _start(self, trial: Any) -> Point:
        point = self._decode(trial.params)
        self._running.setdefault(point_key(point), []).append(trial)
        if self._untried is not None:
            self._untried.pop(point_key(point), None)
        return point

    def tell(self, point: Point, score: float | None) -> None:
        if self._untried is not None:
            self._untried.pop(point_key(point), None)
        if score is not None:
            self._worst = score if self._worst is None else min(self._worst, score)
        # A failed trial counts as bad as the worst, so that the samplers keep away from it.
        value = self._worst if score is None else score
        if value is not None:
            # Settings multiply a throughput: the Gaussian process models its logarithm.
            value = math.log(value) if self._untried is not None and value > 0 else value
            self._values[point_key(point)] = value
        trials = self._running.pop(point_key(point), [])
        for trial in trials:  # several, if the sampler suggested a running point again
            self._finish(trial, value)
        if not trials and value is not None:
            self._add_earlier_trial(point, value)

    def _finish(self, trial: Any, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def _add_earlier_trial(self, point: Point, value: float) -> None:
        """Add a trial of an earlier start of the sweep."""
        with suppress(ValueError, KeyError, TypeError):  # a ledger may hold points of another space
            trial = self._optuna.trial.create_trial(
                params=self._encode(point), distributions=self._distributions, value=value
            )
            self._study.add_trial(trial)


def _choices(domain: Values, ordered: bool) -> list[Any]:
    """Return the values in the order of their indices; numbers of a listed space by size, so
    that near means similar."""
    if ordered and all(map(is_number, domain.values)):
        return sorted(domain.values)
    return list(domain.values)
