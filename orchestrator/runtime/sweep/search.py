"""Which trial comes next: a searcher for Ray Tune. Points that the ledger holds are not tried again, and points that the cluster
has no devices for are told at once; neither ever reaches Tune."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from ray.tune.search import Searcher

from orchestrator.config.space import MAX_POINTS, Point, Range, Space, Values, point_key
from orchestrator.errors import UserError
from orchestrator.record.ledger import TrialRow
from orchestrator.runtime.sweep.surrogate import Surrogate

_TRIES = 200  # suggestions in a row that bring nothing new, before a search is over


class Source(Protocol):
    """Where points come from."""

    def ask(self) -> Point | None:
        """The next one; None when there are no more."""
        ...

    def tell(self, point: Point, score: float | None) -> None:
        """What came of one: the larger the better, None where it failed."""
        ...


class Listed:
    """Points in a given order."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = iter(points)

    def ask(self) -> Point | None:
        return next(self._points, None)

    def tell(self, point: Point, score: float | None) -> None:
        pass


def needed_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "--search optuna needs Optuna: pip install 'expert-orchestrator[optuna]'; or use --search random"
        ) from None
    return optuna


class Optuna:
    """Points that are worth a trial, by what came of those before: those that Optuna's sampler suggests where the space has ranges;
    of lists of values, those that our own model puts into its queue, because Optuna's samplers suggest points of small spaces again and
    again and learn little from few trials. ``first`` are tried before either has a say."""

    def __init__(self, space: Space, seed: int, first: Iterable[Point]) -> None:
        optuna = needed_optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._space = optuna, space
        self._distributions = {name: self._distribution(domain) for name, domain in space.domains.items()}
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=4, multivariate=True, constant_liar=True
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: dict[str, list[Any]] = {}
        self._worst: float | None = None
        self._first = list(first)
        small = space.listed and space.size <= MAX_POINTS
        self._model = _Modelled(space, seed) if small else None

    def _distribution(self, domain: Values | Range) -> Any:
        kinds = self._optuna.distributions
        if isinstance(domain, Values):  # by number: a value may be a tuple, or None
            return kinds.CategoricalDistribution(list(range(len(domain.values))))
        if domain.integer:
            return kinds.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
        return kinds.FloatDistribution(domain.low, domain.high, log=domain.log)

    def _encoded(self, point: Point) -> dict[str, Any]:
        domains = self._space.domains
        return {
            n: d.values.index(point[n]) if isinstance(d := domains[n], Values) else point[n] for n in domains
        }

    def ask(self) -> Point | None:
        wanted = self._first.pop(0) if self._first else self._model.next() if self._model else None
        if wanted is None and self._model:
            return None
        if wanted is not None:
            self._study.enqueue_trial(self._encoded(wanted))
        trial = self._study.ask(self._distributions)
        domains = self._space.domains
        point = {
            n: d.values[trial.params[n]] if isinstance(d := domains[n], Values) else trial.params[n]
            for n in domains
        }
        self._asked.setdefault(point_key(point), []).append(trial)
        if self._model:
            self._model.asked(point)
        return point

    def tell(self, point: Point, score: float | None) -> None:
        if self._model:
            self._model.tell(point, score)
        if score is not None:
            self._worst = score if self._worst is None else min(self._worst, score)
        value = self._worst if score is None else score  # what failed is no better than the worst
        asked = self._asked.pop(point_key(point), [])
        for trial in asked:  # the same may have been suggested again while it was being tried
            self._study.tell(
                trial, value, state=None if value is not None else self._optuna.trial.TrialState.FAIL
            )
        if not asked and value is not None:  # of an earlier start of the sweep
            with suppress(ValueError, KeyError, TypeError):  # a ledger may hold points of another space
                self._study.add_trial(
                    self._optuna.trial.create_trial(
                        params=self._encoded(point), distributions=self._distributions, value=value
                    )
                )


class _Modelled:
    """A finite space, what came of its points, and the model that is asked for the next."""

    def __init__(self, space: Space, seed: int) -> None:
        self._points = space.grid()
        self._number = {point_key(point): number for number, point in enumerate(self._points)}
        self._surrogate = Surrogate(space, seed)
        self._scores: dict[int, float | None] = {}
        self._waiting: set[int] = set()

    def next(self) -> Point | None:
        found = self._surrogate.best(self._scores, self._waiting)
        return None if found is None else self._points[found]

    def asked(self, point: Point) -> None:
        self._waiting.add(self._number[point_key(point)])

    def tell(self, point: Point, score: float | None) -> None:
        number = self._number.get(point_key(point))
        if number is not None:  # a ledger may hold points of another space
            self._waiting.discard(number)
            self._scores[number] = score


class Points(Searcher):
    """Hands points to Tune as trials: numbered, with the workers they need."""

    def __init__(
        self,
        source: Source,
        done: Iterable[TrialRow],
        most: int,
        score: Callable[[TrialRow], float | None],
        needs: Callable[[Point], int | TrialRow],
        refuse: Callable[[TrialRow], None],
    ) -> None:
        """``needs`` says how many workers a point wants, or what became of it if it cannot be tried, which ``refuse`` is told
        of. ``most`` trials are made in all, with those that are done."""
        super().__init__(metric="score", mode="max")
        self._source, self._most, self._score, self._needs, self._refuse = source, most, score, needs, refuse
        self._known: dict[str, float | None] = {}
        self._number, self._over = 0, False
        self._live: dict[str, Point] = {}
        for row in done:
            self._known[point_key(row.point)] = score(row)
            self._number = max(self._number, row.trial)
            source.tell(row.point, score(row))

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        vain = 0
        while not self._over and len(self._known) < self._most and vain < _TRIES:
            point = self._source.ask()
            if point is None:
                break
            key = point_key(point)
            if key in self._known:
                vain += 1
                if key not in (point_key(live) for live in self._live.values()):
                    self._source.tell(point, self._known[key])
                continue
            found = self._next(trial_id, point)
            if found is not None:
                return found
        self._over = True
        return Searcher.FINISHED

    def _next(self, trial_id: str, point: Point) -> dict[str, Any] | None:
        """The trial of a new point; None for one that cannot be tried."""
        self._number += 1
        self._known[point_key(point)] = None
        needed = self._needs(point)
        if isinstance(needed, TrialRow):
            self._refuse(replace(needed, trial=self._number))
            self._source.tell(point, None)
            return None
        self._live[trial_id] = point
        return {"trial": self._number, "point": dict(point), "workers": needed}

    def told(self, trial_id: str, row: TrialRow) -> None:
        """What came of a trial."""
        point = self._live.pop(trial_id, None)
        if point is not None:
            self._known[point_key(point)] = self._score(row)
            self._source.tell(point, self._score(row))

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Told by ``told``, with the whole row."""

    def save(self, checkpoint_path: str) -> None:
        """The ledger is what is kept."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep goes on from its ledger")

    def __reduce__(self) -> tuple[Any, ...]:
        """What Tune pickles of it it never gets to use."""
        return str, ()
