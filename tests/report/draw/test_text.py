"""Tests of the one-line texts of failures, recoveries and changes of experts."""

from typing import Any

import pytest

from harness.fakes.fake_placements import expert_event
from harness.runs.records import made
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.report.draw import text
from orchestrator.report.draw.text import change_line, event_text, event_tone, failure_text, recovery_text

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
    (
        {"workers": 3, "workers_before": 4, "expert_replicas": 1, "expert_replicas_before": 2, "step": 20},
        "recovered on 3 workers instead of 4 in 1 expert group instead of 2 at step 20",
    ),
    ({"workers": 3, "step": 20, "source": "disk"}, "recovered on 3 workers at step 20, from a checkpoint"),
    ({"workers": 3, "step": 0, "lost_steps": 0}, "recovered on 3 workers at step 0"),
    ({}, "recovered"),
]


@pytest.mark.parametrize(("fields", "text"), FAILURES)
def test_failure_text(fields: dict[str, Any], text: str) -> None:
    assert failure_text(made({"event": "failure", **fields})) == text


@pytest.mark.parametrize(("fields", "text"), RECOVERIES)
def test_recovery_text(fields: dict[str, Any], text: str) -> None:
    assert recovery_text(made({"event": "recovery", **fields})) == text


CHANGES: list[tuple[Event, str]] = [
    (
        expert_event(20, "born", [4], parents=[1], hosts=[[1]], reason="entropy 1.31", experts=5),
        "layer 0: expert 4 born from 1, 5 experts now: entropy 1.31",
    ),
    (
        expert_event(20, "born", [4], reason="stalled") | {"loss_before": 0.51, "loss_after": 0.5},
        "layer 0: expert 4 born afresh: stalled (loss 0.51 → 0.5)",
    ),
    (
        expert_event(20, "merged", [5], parents=[0, 3], layer=2) | {"output_change": 0.0312},
        "layer 2: expert 5 merged from 0 and 3 (output changed by 0.031)",
    ),
    (expert_event(20, "pruned", [1], experts=4), "layer 0: expert 1 pruned, 4 experts now"),
    (expert_event(20, "warmed", [4], experts=4), "layer 0: expert 4 ended the warm-up"),
    (expert_event(20, "moved", [4], hosts=[[2]], experts=4), "layer 0: expert 4 moved to host 2"),
    (
        expert_event(20, "moved", [4, 6, 7], hosts=[[2], [0], [2]]),
        "layer 0: experts 4 and 7 moved to host 2, expert 6 to host 0",
    ),
    (
        expert_event(20, "copied", [2, 3], hosts=[[1, 2], [0]]),
        "layer 0: expert 2 now on hosts 1 and 2, expert 3 on host 0",
    ),
    (
        expert_event(20, "moved", [4, 6], hosts=[[2]]),
        "layer 0: expert 4 moved to host 2, expert 6 to unknown hosts",
    ),
    (expert_event(20, "copied", [2], hosts=[[0, 1]]), "layer 0: expert 2 now on hosts 0 and 1"),
    (expert_event(20, "copied", [2], hosts="x"), "layer 0: expert 2 now on unknown hosts"),
    (expert_event(20, "undone", [6], reason="worse\nby far"), "layer 0: change of expert 6 undone: worse"),
]


@pytest.mark.parametrize(("event", "text"), CHANGES)
def test_change_line(event: Event, text: str) -> None:
    change = made(event)
    assert change is not None
    assert change_line(change) == text


def test_every_event_that_is_shown_has_a_tone_and_a_line() -> None:
    """With nothing but the fields that make an event, as in a damaged record."""
    for kind in text._TEXTS:
        given = {
            "event": kind.EVENT,
            "step": 3,
            "status": "failed",
            "change": "undone",
            "layer": 0,
            "ids": [1],
        }
        event = made(given)
        assert event_tone(event) in ("", "good", "calm", "info", "warn", "bad")
        assert "None" not in event_text(event)
