"""Windows of loads: the means, the distance beyond chance, and how long loads last."""

from __future__ import annotations

import json
import random

import pytest

from experts.rebalance.load_history import LoadHistory, LoadWindow, distance

IDS = (0, 1, 3)


def history_of(*windows: tuple[int, ...], steps: int = 5) -> LoadHistory:
    history = LoadHistory()
    for counts in windows:
        history = history.observed(IDS, counts, steps)
    return history


def test_the_mean_weighs_newer_windows_more() -> None:
    history = history_of((0, 0, 5000), (0, 5000, 0))
    assert history.weights == pytest.approx((0.8 / 1.8, 1 / 1.8))
    assert history.mean == pytest.approx((0, 1000 / 1.8, 800 / 1.8))


def test_old_windows_are_forgotten_and_the_long_mean_remembers_them() -> None:
    history = history_of(*[(500, 0, 0)] * 3, *[(0, 500, 0)] * 20)
    assert history.mean == pytest.approx((0, 100, 0))
    assert history.long_mean[0] == pytest.approx(100 * 0.5 ** (20 * 5 / 200))


def test_other_experts_begin_a_new_history() -> None:
    history = history_of((1, 2, 3), (1, 2, 3)).observed((0, 1, 4), (4, 4, 4), 2)
    assert history == LoadHistory((0, 1, 4), (LoadWindow((4, 4, 4), 2),), (2.0, 2.0, 2.0))


def test_a_history_survives_json() -> None:
    history = history_of((1, 2, 3), (6, 5, 4))
    assert LoadHistory.from_json(json.loads(json.dumps(history.to_json()))) == history


def test_chance_is_no_distance() -> None:
    draw = random.Random(0)
    windows = [
        LoadWindow(tuple(sum(draw.random() < 0.3 for _ in range(50)) for _ in range(40)), 5)
        for _ in range(20)
    ]
    assert max(distance(windows[0], window) for window in windows[1:]) == 0


def test_the_distance_is_the_share_of_tokens_that_went_elsewhere() -> None:
    first = LoadWindow((10**8, 10**8, 0), 1)
    assert distance(first, LoadWindow((10**8, 0, 10**8), 1)) == pytest.approx(0.5, abs=1e-3)
    assert distance(first, LoadWindow((2 * 10**8, 2 * 10**8, 0), 2)) == 0
    assert distance(first, LoadWindow((0, 0, 0), 1)) == 0


def test_steady_and_quickly_alternating_loads_last() -> None:
    first, second = (9000, 1000, 0), (1000, 9000, 0)
    assert history_of(*[first] * 8).expected_steps(300) == 300
    assert history_of(*[first, second] * 4).expected_steps(300) == 300


def test_loads_that_change_last_the_shorter_the_faster_they_change() -> None:
    slow = history_of(*[(100_000 - 1000 * i, 1000 * i, 0) for i in range(8)]).expected_steps(300)
    fast = history_of(*[(100_000 - 9000 * i, 9000 * i, 0) for i in range(8)]).expected_steps(300)
    assert fast < slow < 300
    assert slow == pytest.approx(20 * 0.1 / 0.04, rel=0.2)


def test_counts_for_other_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 counts of 5 steps for 3 experts"):
        LoadHistory().observed(IDS, (1, 2), 5)
