"""What a failure cost, as it is written down: with a clock that the test turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.events import EventLog, of_kind, effective_events, read_events
from orchestrator.runtime.expert_parallel import recovery_log as module
from orchestrator.runtime.expert_parallel.recovery_log import RecoveryLog
from orchestrator.runtime.recovery import Failure

LOST = Failure("worker", "host 1 was lost", 1)


class Clock:
    """The seconds of the unix clock, as far as the accounts know."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class Books:
    """Accounts over a record, and what is in it."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.path, self.clock = folder / "events.jsonl", clock
        self.log = EventLog(self.path)
        self.accounts = RecoveryLog(self.log, folder)

    def fails(self, at: float, step: int, workers: int = 3, torn: bool = False) -> None:
        """It strikes, and is noticed two seconds later; a second later it is decided."""
        self.clock.now = at + 3.0
        self.accounts.failed(LOST, "host 1 was lost; a spare takes over", workers, step, (at, at + 2.0), torn)

    def regroups(self, at: float, workers: int = 3, source: str = "memory") -> None:
        """From when on the hosts restore, and have done a second later."""
        self.clock.now = at
        self.accounts.regrouped(workers, source)
        self.clock.now = at + 1.0
        self.accounts.restored()

    def steps(self, at: float, step: int) -> None:
        self.clock.now = at
        self.accounts.stepped(step)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_events(self.path), kind)


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Books:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return Books(tmp_path, clock)


def test_a_run_without_failures_has_nothing_to_tell(books: Books) -> None:
    books.accounts.restored()
    books.accounts.regrouped(3, "memory")
    books.steps(1001.0, 5)
    books.accounts.close()
    assert books.accounts.to_replay == 0
    assert read_events(books.path) == []


def test_one_failure_from_the_strike_to_the_last_step_done_again(books: Books) -> None:
    books.fails(1000.0, step=33)
    (failure,) = books.of("failure")
    assert (failure["kind"], failure["rank"], failure["step"], failure["final"]) == ("worker", 1, 33, False)
    assert failure["message"] == "host 1 was lost; a spare takes over"
    books.regroups(1004.0)
    books.steps(1006.0, 31)
    assert books.of("recovery") == [], "two steps are to be done again still"
    books.steps(1009.0, 34)
    (told,) = books.of("recovery")
    assert (told["attempt"], told["workers_before"], told["workers"], told["source"]) == (1, 3, 3, "memory")
    assert (told["step"], told["lost_steps"]) == (30, 3)
    seconds = [told[f"{part}_seconds"] for part in ("detect", "regroup", "restore", "replay", "total")]
    assert seconds == [2.0, 2.0, 1.0, 4.0, 6.0]
    assert books.accounts.to_replay == 0


def test_a_failure_that_cost_no_step(books: Books) -> None:
    books.fails(1000.0, step=30)
    books.regroups(1004.0, workers=2, source="disk")
    books.steps(1006.0, 31)
    (told,) = books.of("recovery")
    assert (told["step"], told["lost_steps"], told["workers"], told["source"]) == (30, 0, 2, "disk")


def test_steps_that_were_recorded_were_done(books: Books) -> None:
    """The last pulse of a host may be older than what it wrote."""
    for step in (8, 9, 10):
        books.log.write("step", step=step)
    books.fails(at=1000.0, step=9)
    books.regroups(at=1004.0)
    books.steps(at=1006.0, step=6)
    books.steps(at=1008.0, step=10)
    assert [event["lost_steps"] for event in of_kind(read_events(books.path), "recovery")] == [5]


def test_what_is_to_be_done_again_is_known_after_the_first_step(books: Books) -> None:
    books.fails(1000.0, step=33)
    assert books.accounts.to_replay >= 1
    books.regroups(1004.0)
    books.steps(1006.0, 21)
    assert books.accounts.to_replay == 12, "steps 22 to 33"


def test_one_failure_after_the_other(books: Books) -> None:
    for number, at in enumerate((1000.0, 2000.0), start=1):
        books.fails(at, step=33 * number)
        books.regroups(at + 4.0)
        books.steps(at + 6.0, 33 * number)
    assert [told["attempt"] for told in books.of("recovery")] == [1, 2]
    assert [told["step"] for told in books.of("recovery")] == [32, 65]


def test_a_failure_in_a_failure_is_part_of_it(books: Books) -> None:
    """The second strikes before a step was done: one recovery tells of both, from the first strike on."""
    books.fails(1000.0, step=33)
    books.regroups(1004.0)
    books.fails(1010.0, step=0, workers=2)
    books.regroups(1014.0, workers=2)
    books.steps(1016.0, 31)
    books.steps(1018.0, 33)
    assert len(books.of("failure")) == 2
    (told,) = books.of("recovery")
    assert (told["attempt"], told["workers_before"], told["workers"]) == (2, 3, 2)
    assert (told["step"], told["lost_steps"]) == (30, 3), "what the first one lost"
    assert told["total_seconds"] == 16.0
    assert told["detect_seconds"] + told["regroup_seconds"] + told["restore_seconds"] == 15.0


def test_a_failure_while_steps_are_done_again_closes_the_account_before(books: Books) -> None:
    """Each failure has its recovery: the first was over when its first step was done, though not all was done again."""
    books.fails(1000.0, step=33)
    books.regroups(1004.0)
    books.steps(1006.0, 31)
    books.fails(1010.0, step=32)
    books.regroups(1014.0)
    books.steps(1016.0, 32)
    first, second = books.of("recovery")
    assert (first["attempt"], first["step"], first["lost_steps"], first["total_seconds"]) == (1, 30, 3, 6.0)
    assert (second["attempt"], second["step"], second["lost_steps"], second["total_seconds"]) == (
        2,
        31,
        1,
        6.0,
    )


def test_an_account_that_is_closed_by_a_failure_takes_no_step_back(books: Books) -> None:
    """The record as it went: steps that were done between two failures, and not lost, are in it."""
    books.fails(1000.0, step=33)
    books.log.write("start", step=30, workers=3)
    books.regroups(1004.0)
    books.log.write("step", step=31)
    books.steps(1006.0, 31)
    books.fails(1010.0, step=32)
    books.log.write("start", step=31, workers=3)
    books.regroups(1014.0)
    books.log.write("step", step=32)
    books.steps(1016.0, 32)
    assert [
        event["step"] for event in of_kind(effective_events([{"event": "start"}, *read_events(books.path)]), "step")
    ] == [31, 32]


def test_a_change_without_a_failure_has_its_costs_too(books: Books) -> None:
    books.accounts.changes("3 hosts instead of 2", 2, 40, (1000.0, 1000.0))
    books.regroups(1001.0)
    books.steps(1004.0, 41)
    assert books.of("failure") == []
    (told,) = books.of("recovery")
    assert (told["reason"], told["workers_before"], told["workers"]) == ("3 hosts instead of 2", 2, 3)
    assert (told["detect_seconds"], told["lost_steps"], told["total_seconds"]) == (0.0, 0, 4.0)


def test_a_run_that_ends_while_it_mends(books: Books) -> None:
    books.fails(1000.0, step=33)
    books.regroups(1004.0)
    books.accounts.close()
    assert books.of("recovery") == [], "no step was done: nothing was recovered"
    books.fails(2000.0, step=33)
    books.regroups(2004.0)
    books.steps(2006.0, 31)
    books.clock.now = 2008.0
    books.accounts.close()
    (told,) = books.of("recovery")
    assert told["replay_seconds"] == 3.0
    books.accounts.close()
    assert len(books.of("recovery")) == 1


def test_a_torn_line_is_cut_off_before_the_driver_writes(books: Books) -> None:
    books.log.write("notice", message="whole")
    with books.path.open("a") as lost:
        lost.write('{"event": "step", "st')
    books.fails(1000.0, step=33, torn=True)
    assert [event["event"] for event in read_events(books.path)] == ["notice", "failure"]
    assert books.path.read_bytes().count(b"\n") == 2
    assert b'"st{' not in books.path.read_bytes()


def test_where_the_writer_lives_nothing_is_cut_off(books: Books) -> None:
    """A writer in the middle of its line: what it writes next belongs to it."""
    with books.path.open("a") as writer:
        writer.write('{"event": "no')
        writer.flush()
        before = books.path.stat().st_size
        books.accounts.changes("3 hosts instead of 2", 2, 40, (1000.0, 1000.0))
        assert books.path.stat().st_size == before
