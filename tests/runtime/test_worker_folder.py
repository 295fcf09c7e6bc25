"""Tests of the folders of a run on nodes that do not share a disk: one per worker, removed at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.storage.folder_links import ServerHandle
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import read_events
from orchestrator.runtime import folder_link
from orchestrator.runtime.bootstrap import Assignment, worker_folder
from orchestrator.runtime.folder_server import DriverEnd


def test_workers_of_two_nodes_with_one_temporary_folder_have_folders_of_their_own(
    server: ServerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepared: Any = SimpleNamespace(earlier=None)
    link = DriverEnd("memory://run", server)
    assignment = Assignment(prepared, tmp_path / "driver", tmp_path, "this run", None, link)
    folders: set[Path] = set()
    for node in ("node1", "node2"):
        monkeypatch.setattr("socket.gethostname", lambda node=node: node)
        with worker_folder(assignment, 1) as folder:
            folders.add(folder.assignment.run_dir)
    assert len(folders) == 2


def assignment_of(server: ServerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Assignment:
    """Return the data of a worker that is linked to the driver, with folders of its node in ``tmp``."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    prepared: Any = SimpleNamespace(earlier=None)
    link = DriverEnd("memory://run", server)
    return Assignment(prepared, tmp_path / "driver", tmp_path, "this run", None, link)


def test_the_last_worker_of_a_node_removes_the_folders_of_the_run(
    server: ServerHandle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignment = assignment_of(server, tmp_path, monkeypatch)
    monkeypatch.setattr("socket.gethostname", iter(("node1", "node2")).__next__)
    with worker_folder(assignment, 0) as first:
        downloaded = first.assignment.run_dir.parent / "downloaded-1" / "step_00000040"
        downloaded.mkdir(parents=True)
        with worker_folder(assignment, 1) as second:
            (second.assignment.run_dir / "logs" / "worker_1.log").write_text("all of it\n")
        assert not second.assignment.run_dir.exists()
        assert downloaded.exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (driver_dir / "logs" / "worker_1.log").read_text() == "all of it\n"


def test_files_that_did_not_reach_the_driver_stay_on_the_node(
    server: ServerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_LAST_SECONDS", 0.0)
    assignment = assignment_of(server, tmp_path, monkeypatch)
    with worker_folder(assignment, 0) as folder:
        run_dir = folder.assignment.run_dir
        (run_dir.parent / "downloaded-1").mkdir()
        server.is_down = True
        EventLog(run_dir / "events.jsonl").write(kinds.End(status="completed"))
    assert [event["event"] for event in read_events(run_dir / "events.jsonl")] == ["end"]
    assert not (run_dir.parent / "downloaded-1").exists()
