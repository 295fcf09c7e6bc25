"""The cost of kills, as the chaos benchmark computes it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.recovery.chaos_table import costs, recovery_table, spread, spread_table, time_kept
from harness.faults.fault_schedule import FiredFault
from orchestrator.record.events.kinds import JsonEvent as Event


def step(number: int, at: float) -> Event:
    return {"event": "step", "step": number, "time": at, "seconds": 0.01}


def two_kills() -> tuple[list[FiredFault], list[Event]]:
    """Return two kills and the events of their run.

    After the first, a step is recorded late. The second comes before the group is formed, and has
    no failure event."""
    recovery: dict[str, Any] = {
        "event": "recovery",
        "attempt": 1,
        "total_seconds": 2.0,
        "detect_seconds": 0.1,
        "lost_steps": 1,
        "source": "memory",
    }
    events = [
        step(1, 1.0),
        step(2, 2.0),
        step(3, 3.01),
        {"event": "failure", "time": 3.1},
        step(3, 5.0),
        {**recovery, "time": 5.0, "total_seconds": 1.0},
        {**recovery, "time": 5.01},
        *(step(number, number + 2.0) for number in (4, 5, 6, 7)),
    ]
    kill = FiredFault(0, "sigkill", "anywhere", 1, 11, 2, 3.0)
    return [kill, replace(kill, fault=1, rank=0, phase="recovery", time=4.0)], events


def test_a_kill_costs_the_time_to_the_next_step() -> None:
    fired, events = two_kills()
    first, second = costs(fired, events)
    assert first.next_step == pytest.approx(2.0), "the step that was recorded late is no sign of life"
    assert first.back == pytest.approx(3.0)
    assert first.recovery is not None
    assert first.recovery["total_seconds"] == 2.0, "the last event of the attempt counts"
    assert second.next_step == pytest.approx(1.0)
    assert time_kept([first, second], events) == pytest.approx(1 - 3.0 / 8.0)


def test_the_tables_show_the_measured_costs() -> None:
    fired, events = two_kills()
    first, _ = costs(fired, events)
    row = "| 1 | 1 | anywhere | 2 | 0.10 | – | – | – | 2.00 | 2.00 | 1 | memory |"
    assert row in recovery_table([first])
    plain = "| plain TorchTrainer, kill to next step done | 2 | 15.00 | 20.00 | 20.00 |"
    assert plain in spread_table([first], [20.0, 10.0])


def test_the_spread_is_that_of_the_measured_values() -> None:
    values = random.Random(0).sample(range(1, 101), 100)
    assert spread([float(value) for value in values]) == (50.5, 95.0, 100.0)
    assert spread([None, 3.0]) == (3.0, 3.0, 3.0)
    assert spread([None]) is None
