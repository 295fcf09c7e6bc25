"""The searcher of Ray Tune: it turns points into numbered trials. And the point that a search begins with.

Points that the ledger holds are not tried again. Points that the devices are not enough for get
their row at once. Neither reaches Tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ray.tune.search import Searcher

from orchestrator.config.sections.checks import Switch
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.sweep.space import Domain, Point, Space, Values, is_number, point_key
from orchestrator.plan.planning import Plan
from orchestrator.record.files.ledger import TrialRow

_MAX_REPEATED = 200
"""Known points in a row that a source may suggest before the search ends."""


class PointSource(Protocol):
    """A source of points, with Optuna's ask-and-tell interface."""

    def ask(self) -> Point | None:
        """Return the next point; None if there are no more."""
        ...

    def tell(self, point: Point, score: float | None) -> None:
        """Take the score of a point: the larger the better, None if its trial failed."""
        ...


class FixedPoints:
    """Points in a given order."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = iter(points)

    def ask(self) -> Point | None:
        return next(self._points, None)

    def tell(self, point: Point, score: float | None) -> None:
        pass


class NotPickled:
    """Base of objects that Tune pickles and nobody reads: a sweep continues from its own ledger.

    An empty text takes the place of the objects, whose locks and open files cannot be pickled.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ()


@dataclass(frozen=True)
class TrialRules:
    """The decisions about points that a searcher leaves to the sweep."""

    max_trials: int
    """Trials of the whole sweep, those of the ledger included."""
    score: Callable[[TrialRow], float | None]
    workers_or_refusal: Callable[[Point], int | TrialRow]
    """Returns the number of workers of a point's trial; the row of the ledger if it cannot be tried."""
    record: Callable[[TrialRow], None]
    """Writes the row of a point that cannot be tried."""


class TrialSearcher(NotPickled, Searcher):
    """Hands the points of a source to Tune as trials: numbered, with the number of their workers."""

    def __init__(self, source: PointSource, done: Iterable[TrialRow], rules: TrialRules) -> None:
        super().__init__(metric="score", mode="max")
        self._source = source
        self._rules = rules
        self._scores: dict[str, float | None] = {}
        self._running: dict[str, Point] = {}
        self._last_number = 0
        self._finished = False
        for row in done:
            score = rules.score(row)
            self._scores[point_key(row.point)] = score
            self._last_number = max(self._last_number, row.trial)
            source.tell(row.point, score)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # pyrefly: ignore[bad-override]
        """Return the configuration of the next trial, or Tune's mark for the end of the search."""
        repeated = 0
        while not self._finished and len(self._scores) < self._rules.max_trials and repeated < _MAX_REPEATED:
            point = self._source.ask()
            if point is None:
                break
            if point_key(point) in self._scores:
                repeated += 1
                self._repeat_score(point)
                continue
            trial = self._new_trial(trial_id, point)
            if trial is not None:
                return trial
        self._finished = True
        return Searcher.FINISHED

    def _repeat_score(self, point: Point) -> None:
        """Tell the source the known score of a point; a running trial has none yet."""
        key = point_key(point)
        if key not in {point_key(running) for running in self._running.values()}:
            self._source.tell(point, self._scores[key])

    def _new_trial(self, trial_id: str, point: Point) -> dict[str, Any] | None:
        """Return the trial of a new point; None if it cannot be tried."""
        self._last_number += 1
        self._scores[point_key(point)] = None
        workers = self._rules.workers_or_refusal(point)
        if isinstance(workers, TrialRow):
            self._rules.record(replace(workers, trial=self._last_number))
            self._source.tell(point, None)
            return None
        self._running[trial_id] = point
        return {"trial": self._last_number, "point": dict(point), "workers": workers}

    def record_result(self, trial_id: str, row: TrialRow) -> None:
        """Take the row of a trial that has ended."""
        point = self._running.pop(trial_id, None)
        if point is not None:
            score = self._rules.score(row)
            self._scores[point_key(point)] = score
            self._source.tell(point, score)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing: ``record_result`` takes the whole row."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the ledger is the record."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep continues from its ledger")


def planned_point(space: Space, config: Config, plan: Plan) -> Point:
    """Return the point nearest to the given settings and the plan's choices."""
    choices = _planned_values(config, plan)
    for name in space.domains:
        if setting_types()[name] == Switch:
            choices[name] = "on" if choices.get(name) else "off"
    return {name: _nearest(domain, choices.get(name)) for name, domain in space.domains.items()}


def _planned_values(config: Config, plan: Plan) -> dict[str, Any]:
    values = {name: config.value_of(name) for name in flat_names()}
    values |= {name: choice.value for name, choice in plan.choices().items()}
    return values | {"parallel_strategy": plan.strategy.value}


def _nearest(domain: Domain, value: Any) -> Any:
    """Return the value of a domain that is nearest to the given one, or its first value."""
    if isinstance(domain, Values):
        return _nearest_of_list(domain.values, value)
    number = domain.low
    if isinstance(value, int | float):
        number = min(domain.high, max(domain.low, float(value)))
    return round(number) if domain.integer else number


def _nearest_of_list(values: Sequence[Any], value: Any) -> Any:
    if value in values:
        return value
    numbers = [entry for entry in values if is_number(entry)]
    if not is_number(value) or not numbers:
        return values[0]
    return min(numbers, key=lambda number: abs(number - value))
