"""Which trial comes next: nothing twice, nothing that cannot be had, and Optuna's suggestions told what came of them."""

from __future__ import annotations

from typing import Any

import pytest
from ray.tune.search import Searcher

from orchestrator.config.space import Point, point_key
from orchestrator.config.space_parser import parse_space
from orchestrator.record.ledger import TrialRow
from orchestrator.runtime.sweep.search import Listed, Optuna, Points, Source


def points(
    source: Source, done: tuple[TrialRow, ...] = (), most: int = 100, refused: list[TrialRow] | None = None
) -> Points:
    def needs(point: Point) -> int | TrialRow:
        workers = point.get("workers", 1)
        return workers if workers < 9 else TrialRow(0, point, "infeasible", "9 were asked for")

    told: list[TrialRow] = [] if refused is None else refused
    return Points(source, done, most, lambda row: row.samples_per_second, needs, told.append)


def drained(searcher: Points, rate: Any = lambda point: 1.0) -> list[dict[str, Any]]:
    """All trials, each told of at once."""
    found = []
    while isinstance(trial := searcher.suggest(f"id{len(found)}"), dict):
        searcher.told(
            f"id{len(found)}",
            TrialRow(trial["trial"], trial["point"], "completed", samples_per_second=rate(trial["point"])),
        )
        found.append(trial)
    assert trial == Searcher.FINISHED
    return found


def test_points_are_numbered_and_what_cannot_be_had_is_refused_at_once() -> None:
    refused: list[TrialRow] = []
    searcher = points(Listed(parse_space(["workers=9,1,2", "batch-size=1,2"]).grid()), refused=refused)
    first = searcher.suggest("a")
    assert first == {"trial": 3, "point": {"workers": 1, "batch_size": 1}, "workers": 1}
    assert [(row.trial, row.status) for row in refused] == [(1, "infeasible"), (2, "infeasible")]
    assert [trial["trial"] for trial in drained(searcher)] == [4, 5, 6]


def test_what_the_ledger_holds_is_not_tried_again() -> None:
    done = (
        TrialRow(1, {"batch_size": 1}, "completed", samples_per_second=2.0),
        TrialRow(2, {"batch_size": 2}, "failed", "no"),
    )
    found = drained(points(Listed(parse_space(["batch-size=1..4:1"]).grid()), done))
    assert [(trial["trial"], trial["point"]["batch_size"]) for trial in found] == [(3, 3), (4, 4)]


def test_no_more_than_asked_for() -> None:
    assert len(drained(points(Listed(parse_space(["batch-size=1..9:1"]).grid()), most=4))) == 4


def test_optuna_begins_where_it_is_told_to_finds_the_best_and_tries_nothing_twice() -> None:
    pytest.importorskip("optuna")
    space = parse_space(
        ["batch-size=1,2,4,8", "workers=1,2,9", "learning-rate=1e-4..1e-2:log", "experts=2..9"]
    )
    start = {"batch_size": 4, "workers": 2, "learning_rate": 1e-3, "experts": 3}

    def rate(point: Point) -> float:
        return point["batch_size"] * point["workers"] - 100 * abs(point["learning_rate"] - 1e-3)

    refused: list[TrialRow] = []
    found = drained(points(Optuna(space, 0, [start]), most=40, refused=refused), rate)
    assert found[0]["point"] == start
    assert len(found) + len(refused) == 40
    assert len({point_key(trial["point"]) for trial in found}) == len(found)
    assert max(rate(trial["point"]) for trial in found) > 15.5
    assert 0 < len(refused) < 14  # a third of the space: it learns to keep away


def test_optuna_goes_through_a_small_space_and_ends() -> None:
    pytest.importorskip("optuna")
    space = parse_space(["batch-size=1,2,3", "precision=fp32,bf16"])
    done = (TrialRow(1, {"batch_size": 1, "precision": "fp32"}, "completed", samples_per_second=1.0),)
    found = drained(points(Optuna(space, 0, []), done, most=6))
    assert len(found) == 5


def test_optuna_stands_rows_of_another_space() -> None:
    """As a ledger has them that someone changed."""
    pytest.importorskip("optuna")
    space = parse_space(["batch-size=1,2,3", "learning-rate=1e-4..1e-2:log"])
    strange = (
        {},
        {"batch_size": 7, "learning_rate": 1e-3},
        {"batch_size": 1},
        {"batch_size": 1, "learning_rate": "x"},
        {"x": [1]},
    )
    done = tuple(
        TrialRow(n, point, "completed", samples_per_second=1.0) for n, point in enumerate(strange, 1)
    )
    assert len(drained(points(Optuna(space, 0, []), done, most=8))) == 3
