"""Tests of the searcher: no point twice, infeasible points recorded at once, and sources that
learn the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Point
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.search import (
    FixedPoints,
    PointSource,
    TrialRules,
    TrialSearcher,
    planned_point,
)
from orchestrator.trainer import Trainer

MAX_WORKERS = 8


def make_searcher(
    source: PointSource,
    done: tuple[TrialRow, ...] = (),
    max_trials: int = 100,
    refused: list[TrialRow] | None = None,
) -> TrialSearcher:
    """Return a searcher on devices for eight workers; the rows of refused points go into a list."""

    def workers_or_refusal(point: Point) -> int | TrialRow:
        workers = point.get("workers", 1)
        if workers > MAX_WORKERS:
            return TrialRow(0, point, "infeasible", f"{workers} were asked for")
        return workers

    rows: list[TrialRow] = [] if refused is None else refused
    rules = TrialRules(max_trials, lambda row: row.samples_per_second, workers_or_refusal, rows.append)
    return TrialSearcher(source, done, rules)


def run_all(
    searcher: TrialSearcher, rate: Callable[[Point], float] = lambda point: 1.0
) -> list[dict[str, Any]]:
    """Run the trials one after the other; return their configurations."""
    trials: list[dict[str, Any]] = []
    while isinstance(trial := searcher.suggest(f"id{len(trials)}"), dict):
        row = TrialRow(trial["trial"], trial["point"], "completed", samples_per_second=rate(trial["point"]))
        searcher.record_result(f"id{len(trials)}", row)
        trials.append(trial)
    assert trial == Searcher.FINISHED
    return trials


def test_trials_are_numbered_and_infeasible_points_are_recorded_at_once() -> None:
    refused: list[TrialRow] = []
    points = parse_space(["workers=9,1,2", "batch-size=1,2"]).grid()
    searcher = make_searcher(FixedPoints(points), refused=refused)
    first = searcher.suggest("a")
    assert first == {"trial": 3, "point": {"workers": 1, "batch_size": 1}, "workers": 1}
    assert [(row.trial, row.status) for row in refused] == [(1, "infeasible"), (2, "infeasible")]
    assert [trial["trial"] for trial in run_all(searcher)] == [4, 5, 6]


def test_points_of_the_ledger_are_not_tried_again() -> None:
    done = (
        TrialRow(1, {"batch_size": 1}, "completed", samples_per_second=2.0),
        TrialRow(2, {"batch_size": 2}, "failed", "no"),
    )
    points = parse_space(["batch-size=1..4:1"]).grid()
    trials = run_all(make_searcher(FixedPoints(points), done))
    assert [(trial["trial"], trial["point"]["batch_size"]) for trial in trials] == [(3, 3), (4, 4)]


def test_a_search_ends_after_its_number_of_trials() -> None:
    points = parse_space(["batch-size=1..9:1"]).grid()
    assert len(run_all(make_searcher(FixedPoints(points), max_trials=4))) == 4


def test_a_source_that_repeats_itself_learns_the_known_score_and_ends_the_search() -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.scores: list[float | None] = []

        def ask(self) -> Point:
            return {"batch_size": 1}

        def tell(self, point: Point, score: float | None) -> None:
            self.scores.append(score)

    source = Stubborn()
    assert len(run_all(make_searcher(source), lambda point: 7.0)) == 1
    assert set(source.scores) == {7.0}


def test_a_search_begins_next_to_the_plan() -> None:
    config = Config.of(batch_size=48)
    plan = Trainer(config=config).prepare().plan
    space = parse_space(
        [
            "batch-size=16,64",
            "precision=bf16,fp32",
            "learning-rate=1e-3..1e-2",
            "accumulation-steps=1..8",
            "compile=on,off",
        ]
    )
    assert planned_point(space, config, plan) == {
        "batch_size": 64,
        "precision": "fp32",
        "learning_rate": 3e-3,
        "accumulation_steps": 1,
        "compile": "off",
    }
