"""Tests of Optuna's suggestions: where they begin, that few trials find good points, and that
none is tried twice."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from orchestrator.config.sweep.space import Point, Space, point_key
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.optuna_search import OptunaSource
from tests.runtime.sweep.test_search import make_searcher, run_all

pytest.importorskip("optuna")

H200_SPACE = parse_space(
    ["precision=fp32,bf16", "batch-size=8,32", "accumulation-steps=1,4", "compile=off,on"]
)
H200_RATES = (
    616.7, 587.1, 576.4, 681.5, 927.6, 1001.2, 921.3, 1003.0,
    499.7, 573.8, 490.9, 639.6, 1794.8, 2227.8, 1894.5, 2427.7,
)  # fmt: skip
"""Samples per second of each point, in the order of the grid: a transformer, 2026-11-15."""
BEST = {"precision": "bf16", "batch_size": 32, "accumulation_steps": 4, "compile": "on"}


def search(space: Space, rates: Mapping[str, float], first: Point, seed: int, trials: int) -> list[Point]:
    """Return the points that a search tries, each measured with an error of 4 %, the best
    measurement first."""
    generator = random.Random(1000 + seed)
    measured = {key: rate * math.exp(generator.gauss(0, 0.04)) for key, rate in rates.items()}
    searcher = make_searcher(OptunaSource(space, seed, [first]), max_trials=trials)
    tried = [trial["point"] for trial in run_all(searcher, lambda point: measured[point_key(point)])]
    return sorted(tried, key=lambda point: -measured[point_key(point)])


@pytest.mark.extended
def test_half_of_the_trials_find_the_best_point_of_a_measured_grid() -> None:
    """From the plan's own choice there, which is the second best.

    Random search finds it in half of the searches.
    """
    rates = {point_key(point): rate for point, rate in zip(H200_SPACE.grid(), H200_RATES, strict=True)}
    planned = BEST | {"accumulation_steps": 1}
    searches = [search(H200_SPACE, rates, planned, seed, trials=8) for seed in range(10)]
    assert all(len({point_key(point) for point in points}) == 8 for points in searches), "no point twice"
    assert sum(BEST in points for points in searches) >= 9


def test_ranges_begin_at_the_first_point_and_find_a_good_one() -> None:
    space = parse_space(
        ["batch-size=1,2,4,8", "workers=1,2,9", "learning-rate=1e-4..1e-2:log", "experts=2..9"]
    )
    first = {"batch_size": 4, "workers": 2, "learning_rate": 1e-3, "experts": 3}

    def rate(point: Point) -> float:
        return point["batch_size"] * point["workers"] - 100 * abs(point["learning_rate"] - 1e-3)

    refused: list[TrialRow] = []
    searcher = make_searcher(OptunaSource(space, 0, [first]), max_trials=40, refused=refused)
    trials = run_all(searcher, rate)
    assert trials[0]["point"] == first
    assert len(trials) + len(refused) == 40
    assert len({point_key(trial["point"]) for trial in trials}) == len(trials)
    assert max(rate(trial["point"]) for trial in trials) > 15.5
    assert 0 < len(refused) < 14, "a third of the space is infeasible: the sampler keeps away from it"


def test_a_listed_space_is_tried_completely_and_then_the_search_ends() -> None:
    space = parse_space(["batch-size=1,2,3", "precision=fp32,bf16"])
    done = (TrialRow(1, {"batch_size": 1, "precision": "fp32"}, "completed", samples_per_second=1.0),)
    assert len(run_all(make_searcher(OptunaSource(space, 0, []), done, max_trials=6))) == 5


def test_concurrent_trials_get_different_points() -> None:
    """As on a cluster where all trials begin at once: no score is known when the next point is suggested."""
    source = OptunaSource(H200_SPACE, 0, [BEST])
    points = list(iter(source.ask, None))
    assert points[0] == BEST
    assert sorted(map(point_key, points)) == sorted(map(point_key, H200_SPACE.grid()))


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("sign", [1, -1], ids=["throughput", "loss"])
def test_failed_trials_and_negative_scores_are_learnt_from(sign: int) -> None:
    space = parse_space(["width=8,16,32,64,128,256", "precision=fp32,bf16"])
    source = OptunaSource(space, 0, [])
    scores = iter([None, sign * 2.0, sign * 1.0, None, sign * 3.0])
    while (point := source.ask()) is not None:
        source.tell(point, next(scores, sign * 1.5))


def test_rows_of_another_space_are_ignored() -> None:
    """A ledger may have been edited."""
    space = parse_space(["batch-size=1,2,3", "learning-rate=1e-4..1e-2:log"])
    foreign = (
        {},
        {"batch_size": 7, "learning_rate": 1e-3},
        {"batch_size": 1},
        {"batch_size": 1, "learning_rate": "x"},
        {"x": [1]},
    )
    done = tuple(
        TrialRow(number, point, "completed", samples_per_second=1.0)
        for number, point in enumerate(foreign, 1)
    )
    assert len(run_all(make_searcher(OptunaSource(space, 0, []), done, max_trials=8))) == 3
