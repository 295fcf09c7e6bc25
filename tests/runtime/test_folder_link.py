"""Tests of a worker's end of the link between the driver's run folder and its own, without Ray."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.folder_links import ServerHandle, linked, wait_until
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import SilentLog
from orchestrator.record.files.reading import read_events
from orchestrator.runtime import folder_link
from orchestrator.runtime.bootstrap import Assignment, DriverRequests, check_run_dir
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.remote.publish_requests import ABANDON, PUBLISH


def test_events_logs_and_files_of_a_worker_come_to_the_driver(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    with linked(server, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        log.write(kinds.Step(step=1, loss=2.0))
        link.flush()
        assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1]
        (run_dir / "plan.json").write_text('{"batch_size": 4}')
        (run_dir / "logs" / "worker_0.log").write_text("first\n")
        link.flush()
        (run_dir / "logs" / "worker_0.log").open("a").write("second\n")
        log.write(kinds.Step(step=2, loss=1.0))
        log.close()
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1, 2]
    assert json.loads((driver_dir / "plan.json").read_text()) == {"batch_size": 4}
    assert (driver_dir / "logs" / "worker_0.log").read_text() == "first\nsecond\n"


def test_a_worker_begins_with_the_record_and_sees_the_run(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    EventLog(driver_dir / "events.jsonl").write(kinds.Load(step=7))
    run_dir = tmp_path / "worker"
    prepared: Any = None
    with linked(server, run_dir):
        check_run_dir(Assignment(prepared, run_dir, run_dir, "this run", None), "worker 0")
        assert json.loads((run_dir / "plan.json").read_text()) == {"batch_size": 8}
        assert [event["step"] for event in read_events(run_dir / "events.jsonl")] == [7]
    # It has sent nothing twice.
    assert len(read_events(driver_dir / "events.jsonl")) == 1


def test_a_torn_line_is_sent_when_it_is_whole(server: ServerHandle, driver_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    with linked(server, run_dir) as link, (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "step",')
        file.flush()
        link.flush()
        assert (driver_dir / "events.jsonl").read_bytes() == b""
        file.write(' "step": 1}\n')
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1]


def test_a_large_file_stays_and_is_told_once(
    server: ServerHandle,
    driver_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(folder_link, "_MAX_FILE_BYTES", 10)
    with linked(server, tmp_path / "worker") as link:
        (tmp_path / "worker" / "trace.json").write_bytes(bytes(11))
        link.flush()
        link.flush()
    assert not (driver_dir / "trace.json").exists()
    assert caplog.text.count("trace.json has more than 10 B, and is not sent to the driver") == 1
    assert not link.is_complete


def test_requests_of_the_driver_come_to_the_worker(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    with linked(server, run_dir) as link:
        for num_saves in (1, 2):
            DriverRequests(num_saves=num_saves).write(driver_dir / "logs")
            link.flush()
            found = json.loads((run_dir / "logs" / "requests.json").read_text())
            assert found["num_saves"] == num_saves


def test_what_was_written_while_the_driver_did_not_answer_comes_later(
    server: ServerHandle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_FLUSH_SECONDS", 0.0)
    run_dir = tmp_path / "worker"
    server.is_down = True
    with linked(server, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        log.write(kinds.Step(step=1))
        link.flush()
        assert (driver_dir / "events.jsonl").read_bytes() == b""
        server.is_down = False
        log.write(kinds.Step(step=2))
        wait_until(lambda: len(read_events(driver_dir / "events.jsonl")) == 2)


def test_a_flush_does_not_count_while_the_driver_does_not_answer(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    server.is_down = True
    with linked(server, run_dir) as link:
        EventLog(run_dir / "events.jsonl").write(kinds.Step(step=1))
        seen: list[bytes] = []

        def flush() -> None:
            link.flush()
            seen.append((driver_dir / "events.jsonl").read_bytes())

        thread = threading.Thread(target=flush)
        thread.start()
        num_refused = server.num_refused
        wait_until(lambda: server.num_refused > num_refused + 1)
        assert not seen
        server.is_down = False
        thread.join()
    assert b'"step"' in seen[0]


def test_the_last_events_are_sent_again_until_they_arrive(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    with linked(server, run_dir):
        server.is_down = True
        EventLog(run_dir / "events.jsonl").write(kinds.End(status="completed"))
        later = threading.Timer(0.3, setattr, (server, "is_down", False))
        later.start()
    assert [event["event"] for event in read_events(driver_dir / "events.jsonl")] == ["end"]


def test_last_events_that_do_not_arrive_are_told(
    server: ServerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_link, "_LAST_SECONDS", 0.0)
    with linked(server, tmp_path / "worker"):
        server.is_down = True
    assert "the last events and logs did not reach the driver" in caplog.text


def test_files_that_cannot_be_read_are_left_out_and_told_once(
    server: ServerHandle,
    driver_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    run_dir = tmp_path / "worker"
    with linked(server, run_dir) as link:
        os.mkfifo(run_dir / "a.pipe")
        (run_dir / "secret.txt").write_text("of another user")
        for step in (1, 2):
            EventLog(run_dir / "events.jsonl").write(kinds.Step(step=step))
            link.flush()
            assert len(read_events(driver_dir / "events.jsonl")) == step
    assert not (driver_dir / "a.pipe").exists()
    assert caplog.text.count("secret.txt cannot be read, and is not sent to the driver") == 1


def test_the_driver_answers_the_main_host_through_the_link(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    uploads = Mirror(driver_dir, RemoteFolder(f"memory://{uuid4().hex}"))
    uploads.start(SilentLog(), keep=1)
    with linked(server, tmp_path / "worker") as link:
        for number in range(2):
            link.ask(ABANDON, f"5-{number}", b"", lambda: None)
        with pytest.raises(RemoteError, match=r"no readable manifest\.json"):
            link.ask(PUBLISH, "step_00000040.1", b"no manifest", lambda: None)
    uploads.stop()
    assert not list(driver_dir.rglob("*.request"))


def test_a_request_follows_the_events_before_it(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    """A checkpoint is published after the record of its steps."""
    run_dir = tmp_path / "worker"
    server.is_down = True
    with linked(server, run_dir) as link:
        EventLog(run_dir / "events.jsonl").write(kinds.Step(step=1))
        waits: list[int] = []

        def wait() -> None:
            waits.append(1)
            assert not list(driver_dir.rglob("*.request"))
            server.is_down = len(waits) < 3

        seen: list[bytes] = []

        def answer(*_: object) -> str:
            seen.append((driver_dir / "events.jsonl").read_bytes())
            return ""

        server.ask.remote = answer
        link.ask(ABANDON, "5-1", b"", wait)
    assert len(waits) >= 3
    assert b'"step"' in seen[0]


def test_a_main_host_whose_group_was_left_waits_no_longer(server: ServerHandle, tmp_path: Path) -> None:
    def leave() -> None:
        raise TimeoutError("the group was left")

    server.is_down = True
    with linked(server, tmp_path / "worker") as link:
        with pytest.raises(TimeoutError, match="the group was left"):
            link.ask(ABANDON, "5-1", b"", leave)
        server.is_down = False
