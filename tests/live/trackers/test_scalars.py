"""Tests of the numbers that trackers show of events."""

import math
from typing import Any

import pytest

from harness.runs.records import made
from orchestrator.live.trackers.trackers import scalars


def test_numbers_of_a_step_event() -> None:
    event = {
        "event": "step",
        "time": 1.0,
        "step": 7,
        "epoch": 0,
        "loss": 0.5,
        "grad_norm": "nan",
        "lr": 0.003,
    }
    event |= {
        "samples": 64,
        "units": 64,
        "seconds": 0.5,
        "metrics": {"accuracy": 0.9, "aux": "inf", "note": "text", "flag": True, "none": None},
    }
    values = scalars(made(event))
    assert math.isnan(values.pop("train/grad_norm"))
    assert values == {
        "train/loss": 0.5,
        "train/learning_rate": 0.003,
        "train/samples_per_second": 128.0,
        "train/accuracy": 0.9,
        "train/aux": math.inf,
    }


NUMBERS = [
    (
        {
            "event": "evaluate",
            "step": 7,
            "epoch": 1,
            "loss": 0.25,
            "metrics": {"accuracy": 0.9},
            "samples": 9,
            "seconds": 1.0,
            "best": True,
        },
        {"validation/loss": 0.25, "validation/accuracy": 0.9},
    ),
    (
        {
            "event": "phases",
            "time": 1.0,
            "step": 7,
            "steps": 5,
            "data": 0.1,
            "forward": 0.2,
            "backward": 0.4,
            "optimizer": 0.1,
            "total": 0.8,
        },
        {
            "phases/data": 0.1,
            "phases/forward": 0.2,
            "phases/backward": 0.4,
            "phases/optimizer": 0.1,
            "phases/total": 0.8,
        },
    ),
    (
        {
            "event": "epoch",
            "epoch": 2,
            "step": 7,
            "seconds": 3.0,
            "samples": 100,
            "loss": 0.5,
            "memory": {"allocated": 10, "reserved": None},
        },
        {"epoch/seconds": 3.0, "epoch/samples": 100.0, "epoch/loss": 0.5, "epoch/memory_allocated": 10.0},
    ),
    (
        {
            "event": "monitor",
            "step": 7,
            "host": {"cpu_percent": 50},
            "devices": [{"index": 1, "name": "H200", "memory_used": 10, "power": None}],
        },
        {"monitor/host_cpu_percent": 50.0, "monitor/gpu1_memory_used": 10.0},
    ),
    (
        {"event": "load", "step": 7, "steps": 1, "loads": [[4, 4, 4, 4], [6, 0, 0, 2], [0, 0], []]},
        {"experts/layer0_imbalance": 1.0, "experts/layer1_imbalance": 3.0},
    ),
    (
        {
            "event": "exchange",
            "time": 1.0,
            "step": 7,
            "steps": 5,
            "bytes": 4096,
            "seconds": 0.002,
            "rows": 16,
        },
        {
            "exchange/bytes_per_step": 4096.0,
            "exchange/seconds_per_step": 0.002,
            "exchange/rows_per_step": 16.0,
        },
    ),
    ({"event": "exchange", "step": 7, "bytes": None, "seconds": "x"}, {}),
    ({"event": "placement", "step": 0, "method": "lpt", "hosts": [], "layers": []}, {}),
    (
        {
            "event": "recovery",
            "step": 35,
            "attempt": 1,
            "workers": 2,
            "lost_steps": 5,
            "total_seconds": 12.5,
            "reason": "lost",
        },
        {"recovery/workers": 2.0, "recovery/lost_steps": 5.0, "recovery/total_seconds": 12.5},
    ),
    (
        {"event": "expert", "step": 20, "change": "born", "layer": 1, "experts": 5, "ids": [4]},
        {"experts/layer1_number": 5.0},
    ),
    ({"event": "end", "status": "completed", "steps": 4}, {}),
    ({"event": "step", "step": 1}, {}),
    ({"event": "monitor", "step": 1, "host": None, "devices": None}, {}),
]


@pytest.mark.parametrize(("event", "values"), NUMBERS)
def test_events_become_named_numbers(event: dict[str, Any], values: dict[str, float]) -> None:
    assert scalars(made(event)) == values
