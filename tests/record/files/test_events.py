"""Tests of the event log: it survives kills, non-finite numbers and unknown lines."""

import errno
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runs.records import by_step
from orchestrator.record.events import kinds
from orchestrator.record.files import event_log, reading
from orchestrator.record.files.event_log import DriverLog, EventLog, encode_event, truncate_torn_line
from orchestrator.record.files.reading import driver_path, last_events, of_kind, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write_steps(path: Path, *steps: int) -> None:
    log = EventLog(path)
    for step in steps:
        log.write(kinds.Step(step=step, loss=1.0 / step))
    log.close()


def test_events_are_read_in_the_order_they_were_written(path: Path) -> None:
    write_steps(path, 1, 2, 3)
    events = read_events(path)
    assert [event["step"] for event in events] == [1, 2, 3]
    assert events[2]["loss"] == 1.0 / 3  # full precision, to compare runs step by step
    assert all(event["time"] > 0 for event in events)


def test_each_event_is_on_disk_before_the_log_is_closed(path: Path) -> None:
    log = EventLog(path)
    log.write(kinds.Start(total_steps=4))
    assert [event["event"] for event in read_events(path)] == ["start"]
    log.close()
    log.close()  # idempotent


@pytest.mark.parametrize(
    "torn", [b'{"event": "step", "st', b"{", b"\xff\xfe", '{"event": "warning", "message": "§'.encode()[:-1]]
)
def test_a_torn_final_line_is_dropped_by_readers(path: Path, torn: bytes) -> None:
    write_steps(path, 1, 2)
    path.write_bytes(path.read_bytes() + torn)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_a_torn_final_line_is_cut_before_the_next_append(path: Path) -> None:
    write_steps(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "step", "step": 3, "lo')
    write_steps(path, 3)
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_file_of_one_torn_line_is_emptied(path: Path) -> None:
    path.write_bytes(b'{"event": "sta')
    write_steps(path, 1)
    assert [event["step"] for event in read_events(path)] == [1]


def test_a_torn_line_longer_than_a_block_is_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TAIL_BYTES", 16)
    write_steps(path, 1, 2)
    whole = path.read_bytes()
    for torn in (b"x", b"x" * 15, b"x" * 16, b"x" * 17, b"x" * 1000, b""):
        path.write_bytes(whole + torn)
        truncate_torn_line(path)
        assert path.read_bytes() == whole
    path.write_bytes(b"x" * 100)
    truncate_torn_line(path)
    assert path.read_bytes() == b""


def test_last_events_reads_the_newest_lines_of_a_long_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last_events(path) == []
    write_steps(path, *range(1, 100))
    assert [event["step"] for event in last_events(path)] == list(range(1, 100)), "all of a short file"
    monkeypatch.setattr(reading, "_TAIL_BYTES", 500)
    steps = [event["step"] for event in last_events(path)]
    assert steps == list(range(steps[0], 100))
    assert 2 <= len(steps) < 10


def test_by_step_takes_the_last_line_of_a_replayed_step(path: Path) -> None:
    log = EventLog(path)
    for step, loss in ((1, 0.9), (2, 0.8), (3, 0.7), (2, 0.82), (3, 0.72)):
        log.write(kinds.Step(step=step, loss=loss))
        log.write(kinds.Evaluation(step=step, loss=-loss))
    log.close()
    assert [(event["step"], event["loss"]) for event in by_step(read_events(path))] == [
        (1, 0.9),
        (2, 0.82),
        (3, 0.72),
    ]
    assert [event["loss"] for event in by_step(read_events(path), "evaluate")] == [-0.9, -0.82, -0.72]
    assert len(of_kind(read_events(path), "step")) == 5


def test_non_finite_numbers_become_text() -> None:
    line = encode_event(
        {"event": "step", "loss": math.nan, "metrics": {"a": math.inf, "b": [1.0, -math.inf], "c": (2.5,)}}
    )
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not standard JSON"))
    assert event == {"event": "step", "loss": "nan", "metrics": {"a": "inf", "b": [1.0, "-inf"], "c": [2.5]}}
    assert math.isnan(float(event["loss"]))


def test_a_nan_survives_the_file(path: Path) -> None:
    log = EventLog(path)
    log.write(kinds.Step(step=1, loss=math.nan))
    log.close()
    assert math.isnan(float(read_events(path)[0]["loss"]))


def test_listeners_get_every_event_in_order(path: Path) -> None:
    first: list[Any] = []
    second: list[Any] = []
    log = EventLog(path, [first.append, second.append])
    log.write(kinds.Start(total_steps=2))
    log.write(kinds.Step(step=1), kinds.Step(step=2))
    log.close()
    assert [event.EVENT for event in first] == ["start", "step", "step"]
    assert [event.step for event in first] == [None, 1, 2]
    assert second == first


def test_listeners_are_called_after_the_write(path: Path) -> None:
    """An event that a listener shows is in the file, even if the listener then kills the process."""
    num_on_disk: list[int] = []
    log = EventLog(path, [lambda event: num_on_disk.append(len(read_events(path)))])
    log.write(kinds.Start())
    log.write(kinds.End(status="completed"))
    log.close()
    assert num_on_disk == [1, 2]


@pytest.mark.parametrize(
    "line", ["", "not json", "[1, 2]", "17", '"step"', "null", '{"step": 3}', '{"event": 7}']
)
def test_unknown_lines_are_skipped(path: Path, line: str) -> None:
    write_steps(path, 1)
    path.write_text(path.read_text() + line + "\n")
    write_steps(path, 2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_unicode_line_separators_do_not_split_an_event(path: Path) -> None:
    log = EventLog(path)
    log.write(kinds.Warned(kind="x", message="one\u2028two\u0085three\r\nfour"))
    log.close()
    assert read_events(path)[0]["message"] == "one\u2028two\u0085three\r\nfour"


def test_a_missing_file_has_no_events(path: Path) -> None:
    assert read_events(path) == []


# The driver's file


class Writers:
    """The workers' and the driver's logs of a run, whose main worker may be killed inside a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers = EventLog(path)
        self.driver = DriverLog(path)
        self.written: list[int] = []

    def act(self, action: str) -> None:
        if action == "kill":
            self.workers.close()
            with self.path.open("a") as torn:
                torn.write('{"event": "step", "numb')
        elif action == "restart":
            self.workers.close()
            self.workers = EventLog(self.path)  # cuts the torn line
        else:
            number = len(self.written)
            self.written.append(number)
            log = self.driver if action == "driver" else self.workers
            log.write(kinds.Notice(message=str(number)))


@given(st.lists(st.sampled_from(["worker", "driver", "driver", "kill"]), max_size=30))
def test_events_of_two_writers_are_read_in_the_order_of_writing(actions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writers = Writers(Path(folder, "events.jsonl"))
        is_torn = False
        for action in actions:
            if action == "worker" and is_torn:
                writers.act("restart")
            is_torn = (is_torn and action == "driver") or action == "kill"
            writers.act(action)
        events = read_events(writers.path)
        assert [int(event["message"]) for event in events] == writers.written
        assert all(set(event) == {"event", "time", "message"} for event in events)


def test_the_order_does_not_follow_clocks(path: Path) -> None:
    """The machines of the driver and of the main worker may differ by minutes."""
    EventLog(path).write(kinds.Step(time=9000.0, step=1))
    DriverLog(path).write(kinds.Failure(time=1.0, step=1))
    EventLog(path).write(kinds.Start(time=10_000.0, step=0))
    assert [event["event"] for event in read_events(path)] == ["step", "failure", "start"]


@pytest.mark.parametrize("position", ["null", '"many"', "1e300", "[]", "-5", "10000000000000000000000"])
def test_a_damaged_position_costs_the_order_alone(path: Path, position: str) -> None:
    EventLog(path).write(kinds.Step(step=1))
    line = f'{{"event": "failure", "worker_bytes": {position}}}\n'
    driver_path(path).write_text(line, encoding="utf-8")
    assert {event["event"] for event in read_events(path)} == {"step", "failure"}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk with as many free bytes as the first number of the list."""
    free = [10**9]
    write = os.write

    def limited(file: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # A disk takes what fits.
        num_written = write(file, data[: free[0]])
        free[0] -= num_written
        return num_written

    monkeypatch.setattr(event_log.os, "write", limited)
    monkeypatch.setattr(event_log, "_RETRY_SECONDS", 0.0)
    return free


def test_events_are_held_back_while_the_disk_is_full(path: Path, full_disk: list[int]) -> None:
    received: list[Any] = []
    log = EventLog(path, [received.append])
    log.write(kinds.Step(step=1))
    full_disk[0] = 20
    for step in range(2, 6):
        log.write(kinds.Step(step=step))
    assert [event["step"] for event in read_events(path)] == [1], "no torn line is left"
    assert [event.step for event in log.held] == [2, None, 3, 4, 5]
    warnings = [event.message for event in received if event.EVENT == "warning"]
    assert len(warnings) == 1, "once"
    assert str(path) in warnings[0]
    assert "No space left on device" in warnings[0]
    full_disk[0] = 10**9
    log.write(kinds.Step(step=6))
    log.close()
    steps = [event["step"] for event in read_events(path) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in received if event.EVENT == "step"] == steps
    assert "can be written again: 6 events" in read_events(path)[-1]["message"]
    assert not log.held


def test_few_events_are_held_back_and_the_log_says_how_many_are_left_out(
    path: Path, full_disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_HELD", 20)
    log = EventLog(path)
    full_disk[0] = 0
    for step in range(1, 101):
        log.write(kinds.Step(step=step))
        log.write(kinds.Evaluation(step=step)) if step % 50 == 0 else None
        assert len(log.held) <= 21
    full_disk[0] = 10**9
    log.close()
    events = read_events(path)
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps[-1] == 100
    assert [event["step"] for event in events if event["event"] == "evaluate"] == [50, 100]
    assert f"{100 - len(steps)} of steps were left out" in events[-1]["message"]


def test_a_log_on_a_full_disk_can_be_closed(path: Path, full_disk: list[int]) -> None:
    log = EventLog(path)
    full_disk[0] = 0
    log.write(kinds.End(status="completed"))
    log.close()
    assert [event.EVENT for event in log.held] == ["end", "warning"]
    with pytest.raises(ValueError, match="closed"):
        log.write(kinds.Notice())
