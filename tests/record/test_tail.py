"""Following a record that another process writes: every event once and in order, whatever happens to the file."""

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

from orchestrator.record.events import Event, EventLog
from orchestrator.record.screen import Screen
from orchestrator.record.tail import Follower, whole_line_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def line(step: int) -> bytes:
    return json.dumps({"event": "step", "step": step}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def steps(events: list[Event]) -> list[int]:
    return [event["step"] for event in events]


def test_a_file_may_appear_later_and_grow(path: Path) -> None:
    heard: list[Event] = []
    follower = Follower(path, [heard.append])
    assert follower.poll() == 0
    append(path, line(1) + line(2))
    assert follower.poll() == 2
    assert follower.poll() == 0
    append(path, line(3))
    assert follower.poll() == 1
    assert steps(heard) == [1, 2, 3]


def test_each_reader_hears_every_event_in_order(path: Path) -> None:
    heard: list[tuple[str, int]] = []
    follower = Follower(
        path,
        [lambda event: heard.append(("a", event["step"])), lambda event: heard.append(("b", event["step"]))],
    )
    append(path, line(1) + line(2))
    follower.poll()
    assert heard == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("cut", range(1, len(line(2))))
def test_a_torn_line_waits_for_its_rest(path: Path, cut: int) -> None:
    heard: list[Event] = []
    follower = Follower(path, [heard.append])
    append(path, line(1) + line(2)[:cut])
    assert follower.poll() == 1
    append(path, line(2)[cut:])
    assert follower.poll() == 1
    assert steps(heard) == [1, 2]


def test_a_torn_line_that_the_next_writer_cuts_off_is_never_heard(path: Path) -> None:
    heard: list[Event] = []
    follower = Follower(path, [heard.append])
    append(path, line(1) + b'{"event": "step", "step": 2, "loss": 0.123456789')
    follower.poll()
    log = EventLog(path)  # cuts
    assert follower.poll() == 0
    log.write("start", step=0)
    log.close()
    follower.poll()
    assert [event["event"] for event in heard] == ["step", "start"]


def test_following_may_begin_where_an_earlier_process_stopped(path: Path) -> None:
    append(path, line(1) + line(2) + b'{"event": "st')
    heard: list[Event] = []
    follower = Follower(path, [heard.append], from_offset=path.stat().st_size)  # in the middle of a torn line
    assert whole_line_bytes(path) == len(line(1) + line(2))
    log = EventLog(path)
    log.write("step", step=3, note="longer than what was cut off")
    log.close()
    follower.poll()
    assert steps(heard) == [3]


def test_a_file_that_was_replaced_is_read_from_its_beginning(path: Path) -> None:
    heard: list[Event] = []
    append(path, line(1) + line(2))
    follower = Follower(path, [heard.append])
    follower.poll()
    beside = path.with_name("new")
    beside.write_bytes(line(7))
    os.replace(beside, path)
    follower.poll()
    assert steps(heard) == [1, 2, 7]


@pytest.mark.parametrize("odd", [b"\n", b"no json\n", b"[1]\n", b"\xff\xfe\n", b'{"step": 3}\n'])
def test_lines_that_are_no_events_are_passed_over(path: Path, odd: bytes) -> None:
    heard: list[Event] = []
    append(path, line(1) + odd + line(2))
    assert Follower(path, [heard.append]).poll() == 2
    assert steps(heard) == [1, 2]


def test_a_reader_that_raises_ends_neither_the_following_nor_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    seen: list[int] = []

    def odd_one(event: Event) -> None:
        seen.append(event["step"])
        if event["step"] != 2:
            raise KeyError("loss")

    append(path, line(1) + line(2) + line(3))
    with caplog.at_level(logging.WARNING, logger="orchestrator"):
        assert Follower(path, [odd_one, heard.append]).poll() == 3
    assert steps(heard) == seen == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "odd_one" in caplog.text


def test_closing_hands_on_what_is_left(path: Path) -> None:
    heard: list[Event] = []
    follower = Follower(path, [heard.append])
    append(path, line(1))
    follower.close()
    append(path, line(2))
    assert follower.poll() == 0
    follower.close()
    assert steps(heard) == [1]


def test_a_run_is_finished_until_it_starts_again(path: Path) -> None:
    follower = Follower(path, [])
    for kind, finished in (
        ("start", False),
        ("failure", False),
        ("end", True),
        ("start", False),
        ("end", True),
    ):
        append(path, json.dumps({"event": kind}).encode() + b"\n")
        follower.poll()
        assert follower.finished is finished


WRITER = """
import sys, time
from pathlib import Path
from orchestrator.record.events import EventLog
log = EventLog(Path(sys.argv[1]))
log.write("start", total_steps=200, step=0, workers=2)
for step in range(1, 201):
    log.write("step", step=step, epoch=0, loss=1.0 / step, samples=64, units=64, seconds=0.01)
    if step == 120:
        log.write("warning", kind="disk", message="slow")
    time.sleep(0.001)
log.write("end", status="completed", reason="", steps=200, seconds=2.0)
"""


def test_the_screen_shows_a_run_of_another_process(path: Path) -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=False, width=80))
    screen.banner([("processes", "2")], "run")
    heard: list[Event] = []
    follower = Follower(path, [screen, heard.append])
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        end = time.monotonic() + 60
        while not follower.finished and time.monotonic() < end:
            follower.poll()
            time.sleep(0.003)
        writer.wait()
    follower.close()
    assert [event["step"] for event in heard if event["event"] == "step"] == list(range(1, 201))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["run", "  processes  2"]
    assert lines[2].startswith("epoch 1  step 1/200  loss 1")
    assert lines[-1].startswith("epoch 1  step 200/200")
    assert "warning: slow" in lines
