"""Tests of the driver's end of the links between run folders: which changes it writes, and once each."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.storage.folder_links import ServerHandle, linked, wait_until
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import read_events
from orchestrator.runtime.folder_server import FileChange, FolderServer
from orchestrator.storage.folder import RemoteError
from orchestrator.train.remote.publish_requests import PUBLISH, open_requests


def test_events_of_a_main_host_that_was_replaced_are_dropped(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(server, tmp_path / "old") as old:
        EventLog(tmp_path / "old" / "events.jsonl").write(kinds.Step(step=1))
        old.flush()
        with linked(server, tmp_path / "new"):
            EventLog(tmp_path / "old" / "events.jsonl").write(kinds.Step(step=2, loss=0.5))
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write(kinds.Step(step=2))
    events = read_events(driver_dir / "events.jsonl")
    assert [(event["step"], "stale" in event) for event in events] == [(1, False), (2, False)]


def test_a_request_of_a_main_host_that_was_replaced_is_dropped(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    """The next group may have resumed from an earlier checkpoint than the one that it would publish."""
    with (
        linked(server, tmp_path / "old") as old,
        linked(server, tmp_path / "new"),
        pytest.raises(RemoteError, match="the group of this main host was left"),
    ):
        old.ask(PUBLISH, "step_00000040.1", b"a manifest", lambda: None)
    assert open_requests(driver_dir) == []


def test_a_worker_that_opens_the_record_after_the_clock_was_set_back_writes_it(
    server: ServerHandle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(server, tmp_path / "old") as old, monkeypatch.context() as clock:
        clock.setattr("time.time_ns", lambda: 1)
        with linked(server, tmp_path / "new"):
            clock.undo()
            EventLog(tmp_path / "old" / "events.jsonl").write(kinds.Step(step=1, loss=0.5))
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write(kinds.Step(step=1))
    (event,) = read_events(driver_dir / "events.jsonl")
    assert "stale" not in event


def test_files_outside_of_the_run_folder_are_not_written(driver_dir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    server = FolderServer(driver_dir, ())
    writer = server.open(is_main=True).writer
    for call, name in enumerate((str(outside), "../outside", "logs/../../outside", "")):
        for offset in (None, 0):
            server.exchange(writer, call, [FileChange(name, b"written", offset)])
    with pytest.raises(ValueError, match="cannot have the name"):
        server.ask(writer, "publish", "a/../../../outside", b"written")
    assert not outside.exists()
    assert not list(tmp_path.rglob("outside*"))
    server.exchange(writer, 10, [FileChange("own/notes.txt", b"written")])
    assert (driver_dir / "own" / "notes.txt").read_text() == "written"


def test_an_exchange_that_comes_after_a_later_one_writes_nothing(driver_dir: Path) -> None:
    """Its worker has not waited for the reply any longer, and has sent the file again."""
    server = FolderServer(driver_dir, ())
    writer = server.open(is_main=True).writer
    server.exchange(writer, 2, [FileChange("plan.json", b"new")])
    server.exchange(writer, 1, [FileChange("plan.json", b"old")])
    assert (driver_dir / "plan.json").read_bytes() == b"new"


def test_a_restarted_server_takes_events_of_the_worker_that_had_opened_the_record(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(server, tmp_path / "old") as old, linked(server, tmp_path / "new") as new:
        EventLog(tmp_path / "new" / "events.jsonl").write(kinds.Step(step=1))
        new.flush()
        server.restart()
        # Its call comes first: the server knows the later worker all the same.
        EventLog(tmp_path / "old" / "events.jsonl").write(kinds.Step(step=2, loss=0.5))
        old.flush()
        EventLog(tmp_path / "new" / "events.jsonl").write(kinds.Step(step=2))
        new.flush()
    events = read_events(driver_dir / "events.jsonl")
    assert [(event["step"], "stale" in event) for event in events] == [(1, False), (2, False)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_sent_again_after_a_lost_reply_is_written_once(
    server: ServerHandle, driver_dir: Path, tmp_path: Path, is_restarted: bool
) -> None:
    run_dir = tmp_path / "worker"
    with linked(server, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        for step in (1, 2, 3):
            server.num_lost_replies = 1
            log.write(kinds.Step(step=step))
            (run_dir / "logs" / "worker_0.log").open("a").write(f"step {step}\n")
            wait_until(lambda: server.num_lost_replies == 0)
            if is_restarted:
                server.restart()
            link.flush()
        log.close()
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1, 2, 3]
    assert (driver_dir / "logs" / "worker_0.log").read_text() == "step 1\nstep 2\nstep 3\n"
