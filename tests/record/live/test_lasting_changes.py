"""The live counts of expert changes equal those of the summary, after any number of restarts."""

from __future__ import annotations

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import decoded, made
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.live.state import RunState
from orchestrator.record.summary.summary import summarise

MERGE = expert_event(30, "merged", [7], parents=[1, 2], experts=4)
UNDO = expert_event(30, "undone", [7], parents=[1, 2], experts=5)
MOVE = expert_event(12, "moved", [0], hosts=[[1]])
COPY = expert_event(18, "copied", [0], hosts=[[0, 1]])
BIRTH = expert_event(24, "born", [5], experts=5)
FAILURE: Event = {"event": "failure", "time": 20.0, "kind": "worker", "message": "", "step": 19}


def recovery(step: int) -> Event:
    return {"event": "recovery", "time": 21.0, "step": step, "lost_steps": 19 - step, "workers": 2}


HISTORIES: dict[str, list[Event]] = {
    "all last": [MOVE, COPY, BIRTH],
    "one is undone": [MOVE, MERGE, UNDO],
    "one is discarded": [MOVE, COPY, FAILURE, recovery(15)],
    "one is repeated before the recovery is written": [MOVE, COPY, FAILURE, COPY, recovery(18), BIRTH],
    "one is repeated after it": [MOVE, COPY, FAILURE, recovery(17), COPY, BIRTH],
    "one of the first step is kept": [MOVE, COPY, FAILURE, recovery(18), BIRTH],
}


def counts_of(events: list[Event]) -> dict[str, int]:
    state = RunState()
    for event in events:
        state(made(event))
    return state.changes()


@pytest.mark.parametrize("name", HISTORIES)
def test_the_counts_are_those_of_the_summary(name: str) -> None:
    events = run_events(FakeRun(ends="killed", steps=1)) + HISTORIES[name]
    expected = summarise(decoded(events))["expert_changes"]
    assert expected
    assert counts_of(events) == expected


def test_no_change_of_many_is_forgotten() -> None:
    births = [expert_event(step, "born", [step], experts=step) for step in range(10, 3010)]
    assert counts_of([*run_events(FakeRun(ends="killed", steps=1)), *births]) == {"born": 3000}


def test_a_start_says_how_many_steps_are_done() -> None:
    """The steps before it may be missing from the record."""
    state = RunState()
    first, *_ = run_events(FakeRun(ends="killed", steps=1))
    step = {"event": "step", "time": 3.0, "loss": 0.5}
    for event in (first, {**step, "step": 5}, {**first, "step": 9}):
        state(made(event))
    assert state.step == 9
    state(made({**step, "step": 10}))
    assert state.step == 10
