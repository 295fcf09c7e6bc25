"""Tests of following another process's event log: every event once, in order, whatever happens to
the file."""

import io
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from harness.runs.records import decoded
from orchestrator.live.screen.screen import Screen
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event, Step
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.reading import extent_of, read_events, whole_line_bytes
from orchestrator.record.files.tail import Follower


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def line(step: int) -> bytes:
    return json.dumps({"event": "step", "step": step}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def steps(events: list[Event]) -> list[int | None]:
    return [event.step for event in events]


def test_a_file_may_appear_later_and_grow(path: Path) -> None:
    received: list[Event] = []
    follower = Follower(path, [received.append])
    assert follower.poll() == 0
    append(path, line(1) + line(2))
    assert follower.poll() == 2
    assert follower.poll() == 0
    append(path, line(3))
    assert follower.poll() == 1
    assert steps(received) == [1, 2, 3]


def test_each_listener_gets_every_event_in_order(path: Path) -> None:
    received: list[tuple[str, int | None]] = []
    follower = Follower(
        path,
        [
            lambda event: received.append(("a", event.step)),
            lambda event: received.append(("b", event.step)),
        ],
    )
    append(path, line(1) + line(2))
    follower.poll()
    assert received == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("cut", range(1, len(line(2))))
def test_a_torn_line_waits_for_its_rest(path: Path, cut: int) -> None:
    received: list[Event] = []
    follower = Follower(path, [received.append])
    append(path, line(1) + line(2)[:cut])
    assert follower.poll() == 1
    append(path, line(2)[cut:])
    assert follower.poll() == 1
    assert steps(received) == [1, 2]


def test_a_torn_line_that_the_next_writer_cuts_off_is_never_passed_on(path: Path) -> None:
    received: list[Event] = []
    follower = Follower(path, [received.append])
    append(path, line(1) + b'{"event": "step", "step": 2, "loss": 0.123456789')
    follower.poll()
    log = EventLog(path)  # cuts
    assert follower.poll() == 0
    log.write(kinds.Start(step=0))
    log.close()
    follower.poll()
    assert [event.EVENT for event in received] == ["step", "start"]


def test_following_may_start_after_the_whole_lines_that_are_there(path: Path) -> None:
    append(path, line(1) + line(2) + b'{"event": "st')
    received: list[Event] = []
    follower = Follower(path, [received.append], extent_of(path))
    assert whole_line_bytes(path) == len(line(1) + line(2))
    log = EventLog(path)
    log.write(kinds.Step(step=3, metrics={"longer than the torn line": 1.0}))
    log.close()
    follower.poll()
    assert steps(received) == [3]


def test_a_file_that_was_replaced_is_read_from_its_beginning(path: Path) -> None:
    received: list[Event] = []
    append(path, line(1) + line(2))
    follower = Follower(path, [received.append])
    follower.poll()
    replacement = path.with_name("new")
    replacement.write_bytes(line(7))
    os.replace(replacement, path)
    follower.poll()
    assert steps(received) == [1, 2, 7]


@pytest.mark.parametrize("odd", [b"\n", b"no json\n", b"[1]\n", b"\xff\xfe\n", b'{"step": 3}\n'])
def test_lines_that_are_no_events_are_skipped(path: Path, odd: bytes) -> None:
    received: list[Event] = []
    append(path, line(1) + odd + line(2))
    assert Follower(path, [received.append]).poll() == 2
    assert steps(received) == [1, 2]


def test_a_listener_that_raises_stops_neither_the_follower_nor_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Event] = []
    called: list[int | None] = []

    def failing_listener(event: Event) -> None:
        called.append(event.step)
        if event.step != 2:
            raise KeyError("loss")

    append(path, line(1) + line(2) + line(3))
    with caplog.at_level(logging.WARNING, logger="orchestrator"):
        assert Follower(path, [failing_listener, received.append]).poll() == 3
    assert steps(received) == called == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "failing_listener" in caplog.text


def test_close_passes_on_the_remaining_events(path: Path) -> None:
    received: list[Event] = []
    follower = Follower(path, [received.append])
    append(path, line(1))
    follower.close()
    append(path, line(2))
    assert follower.poll() == 0
    follower.close()
    assert steps(received) == [1]


def test_a_run_is_finished_until_it_starts_again(path: Path) -> None:
    follower = Follower(path, [])
    for kind, finished in (
        ("start", False),
        ("failure", False),
        ("end", True),
        ("start", False),
        ("end", True),
    ):
        append(path, json.dumps({"event": kind, "status": "stopped"}).encode() + b"\n")
        follower.poll()
        assert follower.finished is finished


WRITER = """
import sys, time
from pathlib import Path
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
log = EventLog(Path(sys.argv[1]))
log.write(kinds.Start(total_steps=200, step=0, workers=2))
for step in range(1, 201):
    log.write(kinds.Step(step=step, epoch=0, loss=1.0 / step, samples=64, units=64, seconds=0.01))
    if step == 120:
        log.write(kinds.Warned(kind="disk", message="slow"))
    time.sleep(0.001)
log.write(kinds.End(status="completed", reason="", steps=200, seconds=2.0))
"""


def test_the_screen_shows_a_run_of_another_process(path: Path) -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=False, width=80))
    screen.banner([("processes", "2")], "run")
    received: list[Event] = []
    follower = Follower(path, [screen, received.append])
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        end = time.monotonic() + 60
        while not follower.finished and time.monotonic() < end:
            follower.poll()
            time.sleep(0.003)
        writer.wait()
    follower.close()
    assert [event.step for event in received if isinstance(event, Step)] == list(range(1, 201))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["run", "  processes  2"]
    assert lines[2].startswith("epoch 1  step 1/200  loss 1")
    assert lines[-1].startswith("epoch 1  step 200/200")
    assert "warning: slow" in lines


# The driver's file


def test_the_drivers_events_are_passed_on_where_they_belong(path: Path) -> None:
    received: list[Event] = []
    follower = Follower(path, [received.append])
    workers, driver = EventLog(path), DriverLog(path)
    workers.write(kinds.Step(step=1))
    driver.write(kinds.Failure(step=2))
    workers.write(kinds.Start(step=3))
    driver.write(kinds.Recovery(step=4))
    assert follower.poll() == 4
    workers.write(kinds.Step(step=5))
    assert follower.poll() == 1
    assert steps(received) == [1, 2, 3, 4, 5]


def test_an_event_of_the_driver_waits_for_the_lines_that_it_follows(path: Path) -> None:
    """A network drive may show a line of the workers late; at the end nothing waits."""
    received: list[Event] = []
    workers, driver = EventLog(path), DriverLog(path)
    workers.write(kinds.Step(step=1))
    driver.write(kinds.Failure(step=2))
    seen = path.read_bytes()
    path.write_bytes(b"")
    follower = Follower(path, [received.append])
    assert follower.poll() == 0
    path.write_bytes(seen)
    assert follower.poll() == 2
    assert steps(received) == [1, 2]
    driver.write(kinds.Recovery(step=3))
    os.truncate(path, 0)
    follower.close()
    assert steps(received) == [1, 2, 3]


def test_following_a_resumed_run_skips_the_old_events_of_both_files(path: Path) -> None:
    EventLog(path).write(kinds.Step(step=1))
    driver = DriverLog(path)
    driver.write(kinds.Failure(step=2))
    received: list[Event] = []
    follower = Follower(path, [received.append], extent_of(path))
    driver.write(kinds.Recovery(step=3))
    follower.poll()
    assert steps(received) == [3]


WORKER = """
import sys
from pathlib import Path
from orchestrator.record.events.kinds import Step
from orchestrator.record.files.event_log import EventLog
log = EventLog(Path(sys.argv[1]))
for step in range(1, 2001):
    log.write(Step(step=step, metrics={"x" * (step % 50): 1.0}))
"""


def test_two_writers_at_once_lose_nothing_and_keep_cause_before_effect(path: Path) -> None:
    """The driver writes what it has seen of the workers: that must follow it, for every reader."""
    received: list[Event] = []
    follower = Follower(path, [received.append])
    driver = DriverLog(path)
    num_written = 0
    with subprocess.Popen([sys.executable, "-c", WORKER, str(path)]) as writer:
        while writer.poll() is None or not read_events(path):
            seen = [event.step for event in received if isinstance(event, Step)]
            driver.write(kinds.Warned(step=max(seen, default=0), message=str(num_written)))
            num_written += 1
            follower.poll()
    follower.close()
    lines = read_events(path)
    assert decoded(lines) == received
    names = [line["event"] for line in lines]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 2001))
    assert [int(line["message"]) for line in lines if line["event"] == "warning"] == list(range(num_written))
    for index, line in enumerate(lines):
        if line["event"] == "warning" and line["step"]:
            assert names[:index].count("step") >= line["step"]
    assert num_written > 1
