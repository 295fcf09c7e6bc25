"""Tests of event files that grow while they are read, in pieces and in remote folders."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.record.files import tail
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.tail import Follower, RemoteFile, new_lines
from orchestrator.storage.folder import RemoteFolder


def line(step: int, text: str = "") -> bytes:
    return json.dumps({"event": "step", "step": step, "text": text}).encode() + b"\n"


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteFolder]:
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/remote"
    remote = RemoteFolder(place)
    yield remote
    remote.remove(list(remote.files()))


def followed(path: Path, remote: RemoteFolder | None = None) -> tuple[Follower, list[Event]]:
    received: list[Event] = []
    return Follower(path, [received.append], remote=remote), received


@pytest.mark.parametrize("max_bytes", [1, 45, 64, 100, 2**20])
def test_a_long_file_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    monkeypatch.setattr(tail, "MAX_BYTES", max_bytes)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(line(step, "x" * step) for step in range(30)) + b'{"event": "st')
    follower, received = followed(path)
    assert follower.poll() == 30
    assert [event.step for event in received] == list(range(30))
    follower.close()
    assert len(received) == 30


def test_events_of_the_driver_keep_their_place_between_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MAX_BYTES", 100)
    path = tmp_path / "events.jsonl"
    workers = EventLog(path)
    driver = DriverLog(path)
    for step in range(20):
        workers.write(kinds.Step(step=step))
        driver.write(kinds.Failure(step=step))
    follower, received = followed(path)
    follower.poll()
    assert [event.step for event in received] == [step for step in range(20) for _ in range(2)]
    assert [event.EVENT for event in received] == ["step", "failure"] * 20


def test_a_remote_file_is_read_where_the_last_read_ended(folder: RemoteFolder) -> None:
    follower, received = followed(Path("events.jsonl"), folder)
    assert follower.poll() == 0
    folder.write("events.jsonl", line(1) + line(2)[:5])
    assert follower.poll() == 1
    folder.write("events.jsonl", line(1) + line(2))
    assert follower.poll() == 1
    assert follower.poll() == 0
    assert [event.step for event in received] == [1, 2]


def test_only_new_bytes_of_a_remote_file_are_fetched(
    folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    read_range = folder.read_range

    def counted(name: str, begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return read_range(name, begin, end)

    monkeypatch.setattr(folder, "read_range", counted)
    file = RemoteFile(folder, "events.jsonl")
    folder.write("events.jsonl", line(1))
    new_lines(file)
    folder.write("events.jsonl", line(1) + line(2))
    new_lines(file)
    new_lines(file)
    size = len(line(1))
    assert ranges == [(0, size), (size, 2 * size)]


def test_a_shorter_remote_file_is_read_from_its_begin(folder: RemoteFolder) -> None:
    file = RemoteFile(folder, "events.jsonl")
    folder.write("events.jsonl", line(1) + line(2))
    assert new_lines(file) == (0, line(1) + line(2), False)
    folder.write("events.jsonl", line(7))
    assert new_lines(file) == (0, line(7), False)
