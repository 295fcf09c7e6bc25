"""Tests of the driver's end of the links between run folders: which changes it writes, and once each."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.record.files.events import EventLog, read_events
from orchestrator.runtime.folder_server import FolderServer
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.publish_requests import FOLDER as PUBLISH_REQUESTS
from orchestrator.train.remote.publish_requests import open_requests
from tests.support.storage.folder_links import ServerHandle, linked, wait_until


def test_events_of_a_main_host_that_was_replaced_are_dropped(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(server, tmp_path / "old") as old:
        EventLog(tmp_path / "old" / "events.jsonl").write("step", step=1)
        old.flush()
        with linked(server, tmp_path / "new"):
            EventLog(tmp_path / "old" / "events.jsonl").write("step", step=2, stale=True)
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write("step", step=2)
    events = read_events(driver_dir / "events.jsonl")
    assert [(event["step"], "stale" in event) for event in events] == [(1, False), (2, False)]


def test_a_request_of_a_main_host_that_was_replaced_is_dropped(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    """The next group may have resumed from an earlier checkpoint than the one that it would publish."""
    with linked(server, tmp_path / "old") as old, linked(server, tmp_path / "new") as new:
        for worker, name in (("old", "publish-step_00000040.1"), ("new", "publish-step_00000020.2")):
            replace_file(tmp_path / worker / PUBLISH_REQUESTS / f"{name}.request", b"a manifest")
        for link in (old, new):
            link.flush()
    assert [request.subject for request in open_requests(driver_dir)] == ["step_00000020.2"]


def test_a_worker_that_opens_the_record_after_the_clock_was_set_back_writes_it(
    server: ServerHandle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(server, tmp_path / "old") as old, monkeypatch.context() as clock:
        clock.setattr("time.time_ns", lambda: 1)
        with linked(server, tmp_path / "new"):
            clock.undo()
            EventLog(tmp_path / "old" / "events.jsonl").write("step", step=1, stale=True)
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write("step", step=1)
    (event,) = read_events(driver_dir / "events.jsonl")
    assert "stale" not in event


def test_files_outside_of_the_run_folder_are_not_read(driver_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    server = FolderServer(driver_dir, ())
    writer, _ = server.open(is_main=True)
    assert server.exchange(writer, [], [str(secret), "../secret", "plan.json"]).keys() == {"plan.json"}


def test_a_restarted_server_takes_events_of_the_worker_that_had_opened_the_record(
    server: ServerHandle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(server, tmp_path / "old") as old, linked(server, tmp_path / "new") as new:
        EventLog(tmp_path / "new" / "events.jsonl").write("step", step=1)
        new.flush()
        server.restart()
        EventLog(tmp_path / "new" / "events.jsonl").write("step", step=2)
        new.flush()
        EventLog(tmp_path / "old" / "events.jsonl").write("step", step=2, stale=True)
        old.flush()
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
            log.write("step", step=step)
            (run_dir / "logs" / "worker_0.log").open("a").write(f"step {step}\n")
            wait_until(lambda: server.num_lost_replies == 0)
            if is_restarted:
                server.restart()
            link.flush()
        log.close()
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1, 2, 3]
    assert (driver_dir / "logs" / "worker_0.log").read_text() == "step 1\nstep 2\nstep 3\n"
