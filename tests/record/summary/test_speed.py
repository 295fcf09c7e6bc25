"""Tests of the one definition of a run's speed."""

from __future__ import annotations

import pytest

from harness.runs.records import decoded
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.summary.speed import after_warm_up, speed_of


def step(number: int, seconds: float, **fields: object) -> Event:
    return {"event": "step", "step": number, "seconds": seconds, "samples": 8, "units": 80.0, **fields}


def test_rates_and_means_are_over_the_steps_after_the_warm_up() -> None:
    speed = speed_of(decoded([step(1, 9.0, warm_up=True), step(2, 1.0), step(3, 1.0), step(4, 4.0)]))
    assert speed is not None
    assert (speed.samples, speed.units) == (24 / 6, 240 / 6)
    assert (speed.median_step_s, speed.mean_step_s) == (1.0, 2.0)
    assert speed.basis == "3 steps, without 1 of warm-up"


def test_a_run_of_warm_up_alone_has_the_speed_of_all_its_steps() -> None:
    speed = speed_of(decoded([step(1, 3.0, warm_up=True), step(2, 1.0, warm_up=True)]))
    assert speed is not None
    assert speed.samples == 4.0
    assert speed.basis == "2 steps"
    assert [event.step for event in after_warm_up(decoded([step(1, 1.0, warm_up=True)]))] == [1]


def test_steps_without_a_time_have_no_speed() -> None:
    assert speed_of([]) is None
    assert speed_of(decoded([step(1, 0.0), {"event": "step", "step": 2, "seconds": "long"}])) is None


def test_units_that_are_not_counted_are_samples() -> None:
    speed = speed_of(decoded([{"event": "step", "step": 1, "seconds": 2.0, "samples": 8}]))
    assert speed is not None
    assert speed.units == pytest.approx(4.0)
