"""Tests of the request for a sweep: its number of trials, its checks, and its form in the ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import point_key
from orchestrator.config.sweep.space_parser import parse_space, points_space
from orchestrator.config.sweep.sweep import Sweep, config_from_ledger, requested_workers
from orchestrator.config.writer import changed_settings
from orchestrator.errors import UserError

SPACE = parse_space(["batch-size=1,2,3", "workers=1,2"])


@pytest.mark.parametrize(
    ("sweep", "num_trials"),
    [
        (Sweep(SPACE), 6),
        (Sweep(SPACE, trials=4), 4),
        (Sweep(SPACE, "optuna", 4), 4),
        (Sweep(SPACE, "random", 99), 6),
        (Sweep(parse_space(["batch-size=1..1001:1", "experts=1..1001:1"]), "random", 7), 7),
    ],
)
def test_the_number_of_trials_is_requested_and_limited_by_the_space(sweep: Sweep, num_trials: int) -> None:
    assert sweep.num_trials == num_trials


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": "random"}, "give --trials"),
        ({"trials": 0}, "--trials is 0"),
        ({"search": "random", "trials": 10**9}, "at most 10,000 are made"),
        ({"trial_seconds": math.inf}, "positive and finite"),
        ({"trial_steps": 5}, "is for --objective validation_loss"),
        ({"objective": "validation_loss", "trial_seconds": 3.0}, "is for --objective throughput"),
    ],
)
def test_a_contradiction_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sweep(SPACE, **settings)


def test_optuna_is_refused_for_given_points() -> None:
    with pytest.raises(UserError, match="leave --search out"):
        Sweep(points_space([{"batch_size": 16}], "points.yaml"), "optuna", 2)


@pytest.mark.parametrize(
    "sweep",
    [
        Sweep(SPACE, "optuna", 4, asha=True),
        Sweep(parse_space(["learning-rate=1e-4..1e-2:log", "experts=2..9"]), "random", 5, "accuracy:max"),
    ],
)
def test_the_header_of_a_ledger_reads_back_the_same(sweep: Sweep) -> None:
    assert Sweep.of_header(json.loads(json.dumps(sweep.header())), None) == sweep


def test_given_points_read_back_in_their_order() -> None:
    points = [{"batch_size": 16, "workers": 1}, {"batch_size": 64, "workers": 2, "sharding": "zero2"}]
    sweep = Sweep(points_space(points, "points.yaml"))
    again = Sweep.of_header(json.loads(json.dumps(sweep.header())), None)
    assert (sweep.num_trials, again.num_trials) == (2, 2)
    assert [point_key(point) for point in again.space.grid()] == [point_key(point) for point in points]


def test_a_header_without_a_sweep_is_refused() -> None:
    with pytest.raises(UserError, match="does not say what was to be swept"):
        Sweep.of_header({"space": {"batch_size": "1,2"}}, None)


def test_changed_settings_read_back_from_the_ledger() -> None:
    config = Config.of(batch_size=16, task="text", expert_hidden_size=(8, 16), data_dir=Path("/data"))
    changed = changed_settings(config)
    assert changed == {"task": "text", "batch_size": 16, "expert_hidden_size": [8, 16], "data_dir": "/data"}
    assert config_from_ledger(changed) == config
    with pytest.raises(UserError, match="does not know: 'bath_size'"):
        config_from_ledger({"bath_size": 3})


@pytest.mark.parametrize(
    ("entry", "workers", "expected"),
    [
        ("workers=1,4,auto", "auto", [1, 4]),
        ("workers=1..7", "auto", [1, 7]),
        ("experts=3,4", 3, [3]),
        ("experts=3,4", "auto", []),
    ],
)
def test_the_requested_numbers_of_workers(entry: str, workers: Any, expected: list[int]) -> None:
    assert requested_workers(parse_space([entry]), Config.of(workers=workers)) == expected
