"""Tests of the summary of a run from its events: failures, recoveries, lost steps, goodput."""

from typing import Any

import pytest

from harness.runs.records import decoded
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.events.kinds import Step
from orchestrator.record.events.sessions import by_step, recovery_starts, split_sessions
from orchestrator.record.summary.summary import summarise


def at(time: float, event: str, **fields: Any) -> Event:
    return {"event": event, "time": time, **fields}


def steps(first: int, last: int, time: float, loss: float = 1.0) -> list[Event]:
    return [
        at(time + n - first + 1, "step", step=n, loss=loss, seconds=1.0, samples=4, units=4, metrics={})
        for n in range(first, last + 1)
    ]


def start(time: float, step: int, workers: int = 2) -> Event:
    return at(time, "start", step=step, strategy="data_parallel", workers=workers)


def recovery(time: float, step: int, workers: int = 2, lost: int = 5) -> Event:
    return at(
        time,
        "recovery",
        attempt=1,
        workers_before=2,
        workers=workers,
        step=step,
        lost_steps=lost,
        total_seconds=10.0,
    )


FAILURE = at(40, "failure", kind="killed", message="", rank=1, step=40, final=False)
BEGIN = [start(0, 0), *steps(1, 40, 0), FAILURE]
AFTER = steps(36, 45, 50, loss=2.0)
END = at(61, "end", status="completed", reason="all steps done", steps=45, seconds=11.0)
ORDERS = {
    "recovery before start": [*BEGIN, recovery(50, 35), start(50, 35), *AFTER, END],
    "recovery after start": [*BEGIN, start(50, 35), recovery(50, 35), *AFTER, END],
    "recovery after some steps": [*BEGIN, start(50, 35), *AFTER[:3], recovery(53, 35), *AFTER[3:], END],
    "without new processes": [*BEGIN, recovery(50, 35), *AFTER, END],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_recovery_counts_once_wherever_it_is_recorded(order: str) -> None:
    summary = summarise(decoded(ORDERS[order]))
    assert (summary["failures"], summary["recoveries"], summary["lost_steps"]) == (1, 1, 5)
    assert summary["goodput"] == pytest.approx(45 / (50 + 10))
    assert summary["seconds"] == 61  # the workers' last process ran for 11 of them
    assert (summary["status"], summary["steps"], summary["workers"]) == ("completed", 45, 2)


@pytest.mark.parametrize("offset_s", [3600, -3600])
def test_a_wrong_clock_of_a_node_does_not_change_the_time_of_the_run(offset_s: float) -> None:
    """The node that writes from the recovery on; the driver has measured the whole run."""
    final = at(62, "final", step=45, weights="last", reason="", seconds=70.0)
    shifted = [event | {"time": event["time"] + offset_s} for event in (*AFTER, END)]
    events = [*BEGIN, recovery(50, 35), *shifted, final]
    assert summarise(decoded(events))["seconds"] == 70


@pytest.mark.parametrize("order", ORDERS)
def test_discarded_steps_are_gone(order: str) -> None:
    # The run ends before it has caught up.
    events = [event for event in ORDERS[order] if event.get("step", 0) < 38 or event["time"] <= 40]
    steps = by_step(effective_events(decoded(events)), Step)
    assert [step.step for step in steps] == list(range(1, 38))
    assert [step.loss for step in steps][-3:] == [1.0, 2.0, 2.0]


def test_a_resume_by_the_user_counts_as_a_recovery() -> None:
    again = [
        at(
            499, "resume", step=35, path="step_00000035", skipped=[]
        ),  # read before the process starts to train
        start(500, 35),
        *steps(36, 45, 500),
        at(511, "end", status="completed", reason="", steps=45, seconds=11.0),
    ]
    killed = [start(0, 0), *steps(1, 40, 0)]
    summary = summarise(decoded([*killed, *again]))
    assert (summary["failures"], summary["recoveries"], summary["lost_steps"]) == (0, 1, 5)
    assert summary["seconds"] == 40 + 12  # without the pause between the two
    assert split_sessions(decoded([*killed, *again])) == [decoded(killed), decoded(again)]
    mixed = summarise(decoded([*ORDERS["recovery before start"], start(500, 45), *steps(46, 50, 500)]))
    assert mixed["recoveries"] == 2
    assert mixed["status"] == "killed"  # an earlier end says nothing about this one


def test_two_recoveries_to_the_same_step_count_twice() -> None:
    twice = [
        *BEGIN,
        recovery(50, 35),
        start(50, 35),
        *steps(36, 38, 50),
        FAILURE,
        start(65, 35),
        recovery(65, 35, lost=3),
        *AFTER,
        END,
    ]
    summary = summarise(decoded(twice))
    assert (summary["failures"], summary["recoveries"], summary["lost_steps"]) == (2, 2, 8)
    assert len(recovery_starts(decoded(twice))) == 2
    assert len(split_sessions(decoded(twice))) == 1


def test_running_out_of_memory_counts_as_a_recovery() -> None:
    assert summarise(decoded([*ORDERS["recovery before start"], at(70, "oom", step=45)]))["recoveries"] == 2


def test_a_final_failure_counts_and_is_not_recovered_from() -> None:
    final = FAILURE | {"final": True}
    summary = summarise(
        decoded([*BEGIN[:-1], final, at(41, "end", status="failed", reason="killed", steps=40, seconds=41.0)])
    )
    assert (summary["failures"], summary["recoveries"], summary["status"]) == (1, 0, "failed")


def test_workers_are_those_after_the_last_recovery() -> None:
    assert summarise(decoded([*BEGIN, recovery(50, 35, workers=1), *AFTER]))["workers"] == 1


def test_lost_steps_include_lines_that_a_killed_writer_lost() -> None:
    assert summarise(decoded([*BEGIN, recovery(50, 35, lost=7), start(50, 35), *AFTER]))["lost_steps"] == 7


PLACED = at(
    0, "placement", step=0, method="lpt", hosts=[{"rank": 0, "speed": 1.0}, {"rank": 1, "speed": 2.0}],
    layers=[{"name": "ffn", "host_of": [0, 1, 1], "sizes": [10, 20, 30]}],
)  # fmt: skip


def load(step: int, *rows: int) -> Event:
    return at(step, "load", step=step, steps=1, loads=[list(rows)])


def exchange(step: int, count: int, size: float) -> Event:
    return at(step, "exchange", step=step, steps=count, bytes=size, seconds=size / 1000, rows=7)


def test_imbalance_and_exchange_of_expert_parallel_hosts() -> None:
    begin = start(0, 0) | {"strategy": "expert_parallel"}
    # The gate settles: the summary counts the second half, as the report does.
    early = [load(1, 600, 0, 0), load(2, 0, 0, 200)]
    events = [
        begin,
        PLACED,
        *steps(1, 4, 0),
        *early,
        load(3, 6, 3, 2),
        load(4, 12, 3, 2),
        exchange(1, 1, 10),
        exchange(4, 3, 30),
    ]
    summary = summarise(decoded(events))
    assert summary["imbalance"] == pytest.approx((60 + 120) / (60 + 80))
    assert (summary["exchange_bytes_per_step"], summary["exchange_seconds_per_step"]) == (
        25,
        pytest.approx(0.025),
    )


def test_loads_of_repeated_steps_count_once() -> None:
    """A recovery discards loads and exchanges past its step, like the steps themselves."""
    before = [PLACED, load(35, 6, 3, 2), load(40, 600, 0, 0), exchange(35, 1, 10), exchange(40, 1, 999)]
    again = [PLACED | {"step": 35}, load(40, 6, 3, 2), exchange(40, 1, 10)]
    begin = [
        event | {"strategy": "expert_parallel"} if event["event"] == "start" else event for event in BEGIN
    ]
    summary = summarise(decoded([*begin[:-1], *before, FAILURE, recovery(50, 35), *again, *AFTER, END]))
    assert (summary["imbalance"], summary["exchange_bytes_per_step"]) == (1.0, 10)


def test_without_hosts_their_figures_are_none() -> None:
    summary = summarise(decoded(ORDERS["without new processes"]))
    assert {
        summary[name] for name in ("imbalance", "exchange_bytes_per_step", "exchange_seconds_per_step")
    } == {None}


def test_without_events_nothing_is_claimed() -> None:
    summary = summarise([])
    names = ("status", "steps", "goodput", "seconds", "workers")
    assert [summary[name] for name in names] == ["killed", 0, None, 0, None]


def test_steps_before_a_restart_do_not_count_past_its_step() -> None:
    end = at(20, "end", status="completed", reason="", steps=10, seconds=5.0, memory={"allocated": 7})
    events = [start(0, 0), *steps(1, 11, 0, loss=9.0), start(12, 8), *steps(9, 10, 12, loss=2.0)]
    summary = summarise(decoded([*events, end]))
    assert (summary["steps"], summary["train_loss"], summary["lost_steps"]) == (10, 2.0, 3)
    assert summary["peak_memory_bytes"] == 7
    assert [event.loss for event in by_step(effective_events(decoded(events)), Step)][-3:] == [9.0, 2.0, 2.0]


def test_throughput_excludes_the_warm_up_of_each_process() -> None:
    seconds = (60.0, 0.1, 0.1, 30.0, 0.1)
    events = [event | {"seconds": s} for event, s in zip(steps(1, 5, 0), seconds, strict=True)]
    for index in (0, 3):
        events[index]["warm_up"] = True
    assert summarise(decoded(events))["samples_per_second"] == pytest.approx(40)


def session(time: float, status: str | None, num_steps: int = 0) -> list[Event]:
    """Return a start by the user at step 5, some steps, and the end unless the process was killed."""
    events = [start(time, 5), *steps(6, 5 + num_steps, time)]
    return (
        [*events, at(time + 9, "end", status=status, reason=status, steps=5, seconds=9.0)]
        if status
        else events
    )


@pytest.mark.parametrize(
    ("first", "later", "status"),
    [
        ("completed", session(100, "failed"), "completed"),
        ("completed", session(100, None), "completed"),
        ("completed", session(100, "completed"), "completed"),
        ("stopped", session(100, "failed"), "stopped"),
        ("stopped", session(100, "completed"), "completed"),
        ("completed", session(100, "failed", num_steps=2), "failed"),
        ("completed", session(100, None, num_steps=2), "killed"),
        (None, session(100, "failed"), "failed"),
        ("completed", [*session(100, "failed"), *session(200, None)], "completed"),
    ],
)
def test_a_resume_without_a_step_does_not_undo_an_end(
    first: str | None, later: list[Event], status: str
) -> None:
    begin = session(0, first, num_steps=3)
    assert summarise(decoded([*begin, *later]))["status"] == status


def test_the_uploaded_step_is_the_newest_that_is_there() -> None:
    """The best checkpoint may be uploaded after a newer one; a resume abandons those after its step."""

    def upload(time: float, step: int) -> Event:
        return at(time, "upload", step=step, path=f"checkpoints/{step}", bytes=1, seconds=1.0)

    first = [start(0, 0), *steps(1, 40, 0), upload(41, 20), upload(42, 40), upload(43, 10)]
    assert summarise(decoded(first))["uploaded_step"] == 40
    assert summarise(decoded([*first, start(50, 20), *steps(21, 22, 50)]))["uploaded_step"] == 20
    assert (
        summarise(decoded([*first, start(50, 20), *steps(21, 30, 50), upload(70, 30)]))["uploaded_step"] == 30
    )
    assert summarise(decoded([start(0, 0)]))["uploaded_step"] is None
