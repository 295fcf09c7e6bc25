"""Tests of the one-line texts of failures and recoveries."""

from typing import Any

import pytest

from orchestrator.record.text import failure_text, recovery_text

FAILURES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "worker", "message": "host 1 was lost", "rank": 1, "step": 40}, "step 40: host 1 was lost"),
    ({"kind": "worker", "rank": 0, "step": None}, "worker"),
    (
        {"kind": "fault", "message": "worker 1: no such batch\nTraceback", "rank": 1, "step": 0},
        "step 0: worker 1: no such batch",
    ),
    (
        {"kind": "resources", "message": "10.0.0.2 is gone", "rank": None, "step": 4},
        "step 4: 10.0.0.2 is gone",
    ),
    ({"message": " \n"}, "failure"),
    ({}, "failure"),
]
RECOVERIES: list[tuple[dict[str, Any], str]] = [
    (
        {"total_seconds": 12.34, "workers": 2, "workers_before": 2, "step": 35, "lost_steps": 5},
        "recovered in 12.3 s on 2 workers at step 35, 5 steps repeated",
    ),
    (
        {"total_seconds": 1, "workers": 1, "workers_before": 2, "step": 35, "lost_steps": 1},
        "recovered in 1.0 s on 1 worker instead of 2 at step 35, 1 step repeated",
    ),
    (
        {"total_seconds": 0.4, "workers": 3, "step": 40, "lost_steps": 2, "source": "memory"},
        "recovered in 0.4 s on 3 workers at step 40, from snapshots in memory, 2 steps repeated",
    ),
    ({"workers": 3, "step": 20, "source": "disk"}, "recovered on 3 workers at step 20, from a checkpoint"),
    ({"workers": 3, "step": 0, "lost_steps": 0}, "recovered on 3 workers at step 0"),
    ({}, "recovered"),
]


@pytest.mark.parametrize(("fields", "text"), FAILURES)
def test_failure_text(fields: dict[str, Any], text: str) -> None:
    assert failure_text({"event": "failure", **fields}) == text


@pytest.mark.parametrize(("fields", "text"), RECOVERIES)
def test_recovery_text(fields: dict[str, Any], text: str) -> None:
    assert recovery_text({"event": "recovery", **fields}) == text
