"""Tests of the state of a run: after the last event it says what the summary of all events says."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import decoded
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.events.kinds import Load, Start, Step
from orchestrator.record.events.sessions import by_step
from orchestrator.record.experts.host_balance import even_ratios, imbalance, token_counts
from orchestrator.record.experts.placements import placement_at, placement_spans
from orchestrator.record.live.state import MAX_NOTABLE, RECENT_LOADS, SILENT_S, RunState
from orchestrator.record.summary.speed import RECENT_STEPS, speed_of
from orchestrator.record.summary.summary import summarise
from orchestrator.record.summary.thinning import MAX_GROUPS, NUM_RECENT

HOSTED = FakeRun(experts=7, layers=3, workers=3, hosted=True, speeds=(1.0, 0.6), recover_at=75)
RUNS = {
    "one process": FakeRun(),
    "a resumed run": FakeRun(resume_at=50, ends="stopped"),
    "a run that lost a worker": FakeRun(workers=3, recover_at=70),
    "hosts of experts": HOSTED,
    "a failed run": FakeRun(ends="failed"),
}


def state_after(events: list[Event]) -> RunState:
    state = RunState()
    for event in decoded(events):
        state(event)
    return state


@pytest.mark.parametrize("name", RUNS)
def test_the_last_state_equals_the_summary(name: str) -> None:
    events = run_events(RUNS[name])
    state = state_after(events)
    summary = summarise(decoded(events))
    assert state.status == summary["status"]
    assert state.step == summary["steps"]
    assert state.loss == summary["train_loss"]
    assert state.workers == summary["workers"]
    assert state.counts["failures"] == summary["failures"]
    assert state.counts["lost_steps"] in (0, summary["lost_steps"])


@pytest.mark.parametrize("name", RUNS)
def test_the_speed_is_that_of_the_last_steps_that_count(name: str) -> None:
    events = run_events(RUNS[name])
    num_lost = summarise(decoded(events))["lost_steps"]
    for count in range(0, len(events), 7):
        state = state_after(events[:count])
        effective = by_step(effective_events(decoded(events[:count])), Step)
        # Steps that a recovery discards have taken the place of older ones.
        assert len(state.steps) >= min(len(effective), RECENT_STEPS - num_lost)
        steps = effective[len(effective) - len(state.steps) :]
        assert list(state.steps) == steps
        assert state.speed() == speed_of(steps)


def test_hosts_and_experts_equal_the_slow_sums_over_the_last_loads() -> None:
    events = run_events(HOSTED)
    state = state_after(events)
    effective = effective_events(decoded(events))
    spans = placement_spans(effective)
    loads = by_step(effective, Load)[-RECENT_LOADS:]
    waits = []
    times = [0.0] * 2
    for load in loads:
        placement = placement_at(spans, load.step)
        assert placement is not None
        waits += placement.layer_waits(placement.times(token_counts(load)))
        # Before the recovery there were three hosts.
        for layer in placement.times(token_counts(load)) if len(placement.hosts) == 2 else []:
            times = [total + time for total, time in zip(times, layer, strict=True)]
    assert state.experts.imbalance() == pytest.approx(imbalance(waits))
    last = spans[-1][1]
    assert last is not None
    assert state.experts.host_times() == pytest.approx(last.relative_times(times))
    for index, use in enumerate(state.experts.layers()):
        assert use == pytest.approx(even_ratios([token_counts(load)[index] for load in loads]))


def test_a_moved_expert_counts_for_its_new_host() -> None:
    run = FakeRun(experts=3, layers=1, workers=2, hosted=True, ends="killed", steps=20)
    events = run_events(run)
    state = state_after(events)
    placement = state.experts.placement
    assert placement is not None
    (old,) = placement.layers[0].hosts_of[0]
    state(*decoded([expert_event(20, "moved", ids=[0], hosts=[[1 - old]])]))
    moved = state.experts.placement
    assert moved is not None
    assert moved.layers[0].hosts_of[0] == (1 - old,)
    assert state.counts["expert moved"] == 1


def test_a_recovery_after_the_first_new_steps_keeps_them() -> None:
    """New workers may train before the driver writes the recovery."""
    events = run_events(FakeRun(workers=2, recover_at=70, ends="killed"))
    (index,) = (number for number, event in enumerate(events) if event["event"] == "recovery")
    recovery = events.pop(index)
    trained = [number for number, event in enumerate(events) if event["event"] == "step"]
    repeated = [number for number in trained if events[number]["step"] == 65][-1]
    state = state_after([*events[: repeated + 1], recovery])
    assert [event.step for event in state.steps] == list(range(16, 66))
    assert state.counts["recoveries"] == 1


def test_the_time_of_a_run_counts_restarts_of_workers_and_not_the_pause_before_a_resume() -> None:
    recovered = state_after(run_events(FakeRun(workers=2, recover_at=70)))
    assert recovered.began == run_events(FakeRun())[0]["time"]
    resumed = state_after(run_events(FakeRun(resume_at=50)))
    starts = [event for event in run_events(FakeRun(resume_at=50)) if event["event"] == "start"]
    assert resumed.began == starts[1]["time"]


def test_a_failure_means_recovering_until_the_next_step() -> None:
    events = run_events(FakeRun(workers=2, recover_at=70))
    (index,) = (number for number, event in enumerate(events) if event["event"] == "failure")
    assert state_after(events[: index + 1]).status == "recovering"
    assert state_after(events[: index + 2]).status == "running"


def test_a_run_that_is_resumed_is_running_again() -> None:
    events = run_events(FakeRun(ends="stopped"))
    assert state_after(events).status == "stopped"
    start = next(event for event in events if event["event"] == "start")
    assert state_after([*events, start]).status == "running"


def test_the_time_left_is_the_steps_to_come_at_the_recent_speed() -> None:
    events = run_events(FakeRun(ends="killed"))
    half = [event for event in events if event.get("step", 0) <= 60]
    state = state_after(half)
    seconds = [event["seconds"] for event in half if event["event"] == "step"][-RECENT_STEPS:]
    assert state.seconds_left() == pytest.approx(60 * sum(seconds) / RECENT_STEPS)


def test_a_run_without_events_for_long_is_silent_unless_it_ended() -> None:
    running = state_after(run_events(FakeRun(ends="killed")))
    assert running.last_time is not None
    assert running.silence(running.last_time + SILENT_S - 1) is None
    assert running.silence(running.last_time + SILENT_S + 1) == SILENT_S + 1
    ended = state_after(run_events(FakeRun()))
    assert ended.silence(1e12) is None


def test_a_state_does_not_grow_with_the_run() -> None:
    events = run_events(FakeRun(steps=5000, epochs=500, ends="killed"))
    state = state_after(events)
    assert len(state.steps) == RECENT_STEPS
    assert len(state.notable()) == MAX_NOTABLE
    assert len(state.loss_means(10**6)) <= MAX_GROUPS + NUM_RECENT + state.fold.thinned["step"].length


@pytest.mark.parametrize("value", [None, "x", -1, 2**70, float("nan"), [], {}, True])
def test_damaged_events_do_no_harm(value: Any) -> None:
    events = run_events(HOSTED)
    kinds = {event["event"]: event for event in events}
    state = state_after(events)
    for event in kinds.values():
        for name in event.keys() - {"event"}:
            for damaged in decoded([{**event, name: value}]):
                state(damaged)
    state.speed()
    state.seconds_left()
    state.silence(0.0)
    state.experts.host_times()
    state.experts.layers()
    state.experts.imbalance()


def test_a_curve_keeps_its_shape_when_points_go() -> None:
    state = RunState()
    for step in range(1, 10 * MAX_GROUPS + 1):
        state(Step(step=step, loss=float(step)))
    means = state.loss_means(4)
    quarter = 10 * MAX_GROUPS / 4
    assert means == pytest.approx([quarter * (part + 0.5) for part in range(4)], rel=0.15)
    state(Start(step=int(quarter)))
    assert max(state.loss_means(100)) <= quarter
    assert state.step == quarter
