"""The recorded cost of failures, with a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.runs.records import decoded, made
from orchestrator.record.events import kinds
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import Step
from orchestrator.record.events.sessions import of_type
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.runtime.recovery import Failure
from orchestrator.runtime.recovery_log import FailureTimes, RecoveryLog

LOST = Failure("worker", "host 1 was lost", 1)


class Run:
    """A recovery log over the event log of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events.jsonl"
        self.workers_log = EventLog(self.path)
        self.log = DriverLog(self.path)
        self.recovery = RecoveryLog(self.log, folder)

    def fail(self, at: float, step: int, workers: int = 3) -> None:
        """Fail at a time. The failure is detected two seconds later."""
        times = FailureTimes(at, at + 2.0)
        reason = "host 1 was lost; a spare takes over"
        self.recovery.failed(LOST, reason, workers, step, times)

    def regroup(self, at: float, workers: int = 3, source: str = "memory") -> None:
        """Regroup at a time. The state is restored a second later."""
        self.recovery.regrouped(workers, source, at)
        self.recovery.restored(at + 1.0)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_events(self.path), kind)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_without_failures_writes_nothing(run: Run) -> None:
    run.recovery.regrouped(3, "memory", 1000.0)
    run.recovery.restored(1000.0)
    run.recovery.stepped(5, 1001.0)
    run.recovery.close(1002.0)
    assert run.recovery.steps_to_replay == 0
    assert read_events(run.path) == []


def test_one_failure_from_the_loss_to_the_last_repeated_step(run: Run) -> None:
    run.fail(1000.0, step=33)
    (failure,) = run.of("failure")
    assert (failure["kind"], failure["rank"], failure["step"], failure["final"]) == ("worker", 1, 33, False)
    assert failure["message"] == "host 1 was lost; a spare takes over"
    run.regroup(1004.0)
    run.recovery.stepped(31, 1006.0)
    assert run.of("recovery") == [], "two steps are still to be repeated"
    run.recovery.stepped(34, 1009.0)
    (recovery,) = run.of("recovery")
    assert (recovery["attempt"], recovery["source"]) == (1, "memory")
    assert (recovery["workers_before"], recovery["workers"]) == (3, 3)
    assert (recovery["step"], recovery["lost_steps"]) == (30, 3)
    parts = ("detect", "regroup", "restore", "replay", "total")
    assert [recovery[f"{part}_seconds"] for part in parts] == [2.0, 2.0, 1.0, 4.0, 6.0]
    assert run.recovery.steps_to_replay == 0


def test_a_failure_that_lost_no_step(run: Run) -> None:
    run.fail(1000.0, step=30)
    run.regroup(1004.0, workers=2, source="disk")
    run.recovery.stepped(31, 1006.0)
    (recovery,) = run.of("recovery")
    assert (recovery["step"], recovery["lost_steps"]) == (30, 0)
    assert (recovery["workers"], recovery["source"]) == (2, "disk")


def test_recorded_steps_count_as_done(run: Run) -> None:
    """A host's last heartbeat may be older than the last step that it recorded."""
    for step in (8, 9, 10):
        run.workers_log.write(kinds.Step(step=step))
    run.fail(at=1000.0, step=9)
    run.regroup(at=1004.0)
    run.recovery.stepped(6, 1006.0)
    run.recovery.stepped(10, 1008.0)
    assert [recovery["lost_steps"] for recovery in run.of("recovery")] == [5]


def test_the_steps_to_replay_are_known_after_the_first_step(run: Run) -> None:
    run.fail(1000.0, step=33)
    assert run.recovery.steps_to_replay >= 1
    run.regroup(1004.0)
    run.recovery.stepped(31, 1006.0)
    assert run.recovery.steps_to_replay == 2
    run.recovery.stepped(33, 1008.0)
    assert run.recovery.steps_to_replay == 0


def test_two_failures_have_a_recovery_each(run: Run) -> None:
    for number, step in enumerate((33, 66)):
        at = 1000.0 + 100.0 * number
        run.fail(at, step)
        run.regroup(at + 4.0)
        run.recovery.stepped(step, at + 6.0)
    assert [recovery["attempt"] for recovery in run.of("recovery")] == [1, 2]
    assert [recovery["step"] for recovery in run.of("recovery")] == [32, 65]


def test_a_failure_before_the_first_step_adds_to_the_recovery_under_way(run: Run) -> None:
    """One recovery covers both failures, from the first one on."""
    run.fail(1000.0, step=33)
    run.regroup(1004.0)
    run.fail(1010.0, step=0, workers=2)
    run.regroup(1014.0, workers=2)
    run.recovery.stepped(31, 1016.0)
    run.recovery.stepped(33, 1018.0)
    assert len(run.of("failure")) == 2
    (recovery,) = run.of("recovery")
    assert (recovery["attempt"], recovery["workers_before"], recovery["workers"]) == (2, 3, 2)
    assert (recovery["step"], recovery["lost_steps"]) == (30, 3), "the first failure lost these"
    assert recovery["total_seconds"] == 16.0
    parts = ("detect", "regroup", "restore")
    assert sum(recovery[f"{part}_seconds"] for part in parts) == 15.0


def test_a_failure_during_the_replay_ends_the_recovery_before(run: Run) -> None:
    """The first recovery was over with its first step, though not all lost steps were repeated."""
    run.fail(1000.0, step=33)
    run.regroup(1004.0)
    run.recovery.stepped(31, 1006.0)
    run.fail(1010.0, step=32)
    run.regroup(1014.0)
    run.recovery.stepped(32, 1016.0)
    first, second = run.of("recovery")
    assert (first["attempt"], first["step"], first["lost_steps"]) == (1, 30, 3)
    assert (second["attempt"], second["step"], second["lost_steps"]) == (2, 31, 1)
    assert [recovery["total_seconds"] for recovery in (first, second)] == [6.0, 6.0]


def test_a_recovery_that_a_failure_ends_keeps_the_steps_in_between(run: Run) -> None:
    """Steps that were done between two failures, and not lost, stay in the record."""
    run.fail(1000.0, step=33)
    run.workers_log.write(kinds.Start(step=30, workers=3))
    run.regroup(1004.0)
    run.workers_log.write(kinds.Step(step=31))
    run.recovery.stepped(31, 1006.0)
    run.fail(1010.0, step=32)
    run.workers_log.write(kinds.Start(step=31, workers=3))
    run.regroup(1014.0)
    run.workers_log.write(kinds.Step(step=32))
    run.recovery.stepped(32, 1016.0)
    events = effective_events(decoded([{"event": "start"}, *read_events(run.path)]))
    assert [event.step for event in of_type(events, Step)] == [31, 32]


def test_a_change_of_the_group_without_a_failure_has_a_cost_too(run: Run) -> None:
    run.recovery.begin("3 hosts instead of 2", 2, 40, FailureTimes(1000.0, 1000.0))
    run.regroup(1001.0)
    run.recovery.stepped(41, 1004.0)
    assert run.of("failure") == []
    (recovery,) = run.of("recovery")
    assert recovery["reason"] == "3 hosts instead of 2"
    assert (recovery["workers_before"], recovery["workers"]) == (2, 3)
    assert (recovery["detect_seconds"], recovery["lost_steps"]) == (0.0, 0)
    assert recovery["total_seconds"] == 4.0


def test_a_run_that_ends_during_a_recovery(run: Run) -> None:
    run.fail(1000.0, step=33)
    run.regroup(1004.0)
    run.recovery.close(1005.0)
    assert run.of("recovery") == [], "no step was done, so nothing was recovered"
    run.fail(2000.0, step=33)
    run.regroup(2004.0)
    run.recovery.stepped(31, 2006.0)
    run.recovery.close(2008.0)
    (recovery,) = run.of("recovery")
    assert recovery["replay_seconds"] == 3.0
    run.recovery.close(2009.0)
    assert len(run.of("recovery")) == 1


def test_the_reason_can_be_revised_until_the_recovery_ends(run: Run) -> None:
    run.recovery.revise("no recovery is under way")
    run.fail(1000.0, step=30)
    run.recovery.revise("2 of 3 hosts")
    run.regroup(1004.0, workers=2)
    run.recovery.stepped(31, 1006.0)
    (recovery,) = run.of("recovery")
    assert recovery["reason"] == "2 of 3 hosts"


# Torn lines


def test_a_torn_line_of_a_lost_writer_is_left_to_the_next_writer(run: Run) -> None:
    run.workers_log.write(kinds.Notice(message="whole"))
    with run.path.open("a") as lost_writer:
        lost_writer.write('{"event": "step", "st')
    size = run.path.stat().st_size
    run.fail(1000.0, step=33)
    assert run.path.stat().st_size == size, "the file of the workers is theirs"
    EventLog(run.path).write(kinds.Start(step=30))
    assert [event["event"] for event in read_events(run.path)] == ["notice", "failure", "start"]


def test_the_unfinished_line_of_a_living_writer_is_kept(run: Run) -> None:
    with run.path.open("a") as writer:
        writer.write('{"event": "no')
        writer.flush()
        size = run.path.stat().st_size
        run.recovery.begin("3 hosts instead of 2", 2, 40, FailureTimes(1000.0, 1000.0))
        assert run.path.stat().st_size == size


# Restarted workers, which report by events


def start(at: float, build_seconds: float, workers: int = 2) -> dict[str, Any]:
    return {"event": "start", "time": at, "workers": workers, "step": 30, "build_seconds": build_seconds}


def step(number: int, at: float) -> dict[str, Any]:
    return {"event": "step", "time": at, "step": number}


def observe(run: Run, line: dict[str, Any]) -> None:
    run.recovery.observe(made(line), line["time"])


def test_a_restart_is_measured_by_the_events_of_the_new_workers(run: Run) -> None:
    run.fail(1000.0, step=33)
    observe(run, step(33, 999.0))
    assert run.recovery.steps_to_replay >= 1, "a step of the workers before says nothing about the restart"
    for event in (start(1008.0, 1.5), step(31, 1010.0), step(32, 1010.1), step(33, 1010.2)):
        observe(run, event)
    observe(run, {"event": "notice", "time": 1011.0, "message": "other events do not matter"})
    (recovery,) = run.of("recovery")
    assert (recovery["workers_before"], recovery["workers"], recovery["source"]) == (3, 2, "disk")
    assert (recovery["step"], recovery["lost_steps"]) == (30, 3)
    parts = ("detect", "regroup", "restore", "replay", "total")
    seconds = [recovery[f"{part}_seconds"] for part in parts]
    assert seconds == pytest.approx([2.0, 4.5, 1.5, 2.2, 10.0])


def test_a_restart_that_fails_before_its_first_step_is_part_of_the_next_one(run: Run) -> None:
    run.fail(1000.0, step=33)
    observe(run, start(1008.0, 1.5))
    run.fail(1009.0, step=0, workers=2)
    for event in (start(1015.0, 1.0), step(31, 1016.0), step(33, 1017.0)):
        observe(run, event)
    (recovery,) = run.of("recovery")
    assert (recovery["attempt"], recovery["workers_before"]) == (2, 3)
    assert recovery["total_seconds"] == 16.0


def test_both_strategies_write_the_same_fields(run: Run) -> None:
    run.fail(1000.0, step=30)
    run.regroup(1004.0)
    run.recovery.stepped(31, 1006.0)
    run.fail(2000.0, step=30)
    observe(run, start(2008.0, 1.5))
    observe(run, step(31, 2010.0))
    hosts, workers = run.of("recovery")
    assert hosts.keys() == workers.keys()


def test_the_groups_before_are_those_of_the_last_group_that_trained(run: Run) -> None:
    """A loss while the hosts join again belongs to the same recovery."""
    run.recovery.regrouped(6, "disk", 999.0, 3)
    run.fail(1000.0, step=33)
    run.recovery.regrouped(5, "memory", 1001.0, 1)
    run.fail(1002.0, step=33)
    run.recovery.regrouped(4, "memory", 1003.0, 2)
    run.recovery.restored(1004.0)
    run.recovery.stepped(34, 1005.0)
    run.recovery.begin("6 hosts instead of 4", 4, 40, FailureTimes(1010.0, 1010.0))
    run.recovery.regrouped(6, "memory", 1011.0, 3)
    run.recovery.restored(1012.0)
    run.recovery.stepped(41, 1013.0)
    groups = [(event["expert_replicas_before"], event["expert_replicas"]) for event in run.of("recovery")]
    assert groups == [(3, 2), (2, 3)]
