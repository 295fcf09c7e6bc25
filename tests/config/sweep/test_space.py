"""Tests of search spaces: their grids, their random points, and points as flags."""

from __future__ import annotations

from itertools import islice

import pytest

from orchestrator.config.sweep.space import MAX_POINTS, point_flags, point_key
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.errors import UserError


def test_a_grid_has_every_combination_once() -> None:
    grid = parse_space(["batch-size=1,2", "precision=fp32,bf16", "workers=1..3:1"]).grid()
    assert len(grid) == len({point_key(point) for point in grid}) == 12
    assert grid[0] == {"batch_size": 1, "precision": "fp32", "workers": 1}


def test_a_grid_needs_lists_of_values_and_has_a_limit() -> None:
    with pytest.raises(UserError, match="is a range; give it steps"):
        parse_space(["learning-rate=1e-4..1e-2:log"]).grid()
    with pytest.raises(UserError, match="the grid has 1,002,001 points"):
        parse_space(["batch-size=1..1001:1", "experts=1..1001:1"]).grid()
    assert MAX_POINTS < 1_002_001


def test_random_points_depend_on_the_seed_and_none_comes_twice() -> None:
    space = parse_space(["batch-size=1,2,3", "learning-rate=1e-4..1e-2:log", "experts=2..9"])
    first = list(islice(space.draws(3), 50))
    again = list(islice(space.draws(3), 50))
    other_seed = list(islice(space.draws(4), 50))
    assert first == again != other_seed
    assert len({point_key(point) for point in first}) == 50
    assert all(1e-4 <= point["learning_rate"] <= 1e-2 and 2 <= point["experts"] <= 9 for point in first)


def test_a_logarithmic_range_is_drawn_log_uniformly() -> None:
    space = parse_space(["learning-rate=1e-4..1e-2:log"])
    below_the_middle = sum(point["learning_rate"] < 1e-3 for point in islice(space.draws(0), 400))
    assert 140 < below_the_middle < 260


def test_random_points_end_when_all_were_drawn() -> None:
    assert len(list(parse_space(["batch-size=1,2,3", "workers=1,2"]).draws(0))) == 6


def test_a_point_becomes_flags() -> None:
    point = {
        "batch_size": 16,
        "deterministic": True,
        "static_graph": False,
        "compile": "off",
        "capacity_factor": None,
        "precision": "fp32",
    }
    expected = "--batch-size 16 --deterministic --no-static-graph --compile off --precision fp32"
    assert point_flags(point) == expected.split()
