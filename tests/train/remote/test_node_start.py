"""Tests of a worker whose run begins with a checkpoint of another remote run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.run.run_dir import given_location
from orchestrator.runtime.bootstrap import Assignment, worker_folder
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints
from orchestrator.train.remote.remote_start import RemoteStart, downloaded_start, remote_start
from orchestrator.train.worker.resume import check_start_checkpoint, find_candidates

NAME = "step_00000040"


@pytest.fixture
def run(tmp_path: Path) -> RemoteFolder:
    """A remote run with a checkpoint."""
    remote = RemoteFolder(f"memory://{uuid4().hex}/run1")
    store = CheckpointStore(tmp_path / "written")
    save_checkpoint(store, 40, small_contents(40))
    RemoteCheckpoints(remote / "checkpoints").upload(store.folder / NAME, lambda: None)
    for name in ("events.jsonl", "config.yaml", "hf/config.json"):
        remote.write(name, b"{}")
    return remote


@pytest.fixture
def copy(run: RemoteFolder, tmp_path: Path) -> Iterator[Path]:
    """The copy of the driver."""
    with downloaded_start("--resume", run.url, tmp_path / "results", print) as folder:
        yield folder


def assignment_of(
    config: Config, earlier: Path | None, start: RemoteStart | None, folder: Path
) -> Assignment:
    parts: Any = SimpleNamespace()
    prepared = PreparedRun(Resolved(config, {}), parts, parts, parts, parts, earlier=earlier)
    return Assignment(prepared, folder, folder, "nonce1", None, start=start)


@pytest.fixture
def assignment(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Assignment:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    config = Config.of(resume=str(copy))
    return assignment_of(config, copy, remote_start(config), tmp_path / "run")


def read_start(assignment: Assignment, run_dir: Path, listed: Path | None = None) -> Path:
    """Let a worker load the checkpoint, which it or another worker has listed. Return its listed path."""
    with worker_folder(assignment, 0) as folder:
        prepared = folder.assignment.prepared
        config = prepared.resolved.config
        check_start_checkpoint(config)
        assert prepared.earlier is not None
        assert (prepared.earlier / "hf" / "config.json").read_bytes() == b"{}"
        store = folder.open_store(run_dir / "checkpoints", repair=False)
        (path,) = find_candidates(str(config.checkpoint.resume), store).paths
        with store.reading(listed or Path(path)) as readable:
            assert load(readable).tensors["model"]
        return Path(path)


def test_a_worker_that_sees_the_copy_of_the_driver_reads_it(
    assignment: Assignment, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(RemoteFolder, "download", refuse)
    path = read_start(
        assignment, tmp_path / "run", listed=Path("/other/node", copy.name, "checkpoints", NAME)
    )
    assert path == copy / "checkpoints" / NAME


def test_a_worker_that_does_not_see_the_copy_downloads_the_checkpoint(
    assignment: Assignment, run: RemoteFolder, copy: Path, tmp_path: Path
) -> None:
    listed_by_driver = copy / "checkpoints" / NAME
    shutil.rmtree(copy)
    for listed in (None, listed_by_driver):
        path = read_start(assignment, tmp_path / "run", listed)
        assert path.is_relative_to(tmp_path / "tmp")
    assert list((tmp_path / "tmp").iterdir()) == [], "the last worker removes all copies"
    copy.mkdir()
    with worker_folder(assignment, 0) as folder:
        resume = Path(str(folder.assignment.prepared.resolved.config.checkpoint.resume))
        assert given_location(resume) == run.url


def test_a_restarted_worker_needs_the_other_run_no_more(
    assignment: Assignment, run: RemoteFolder, copy: Path, tmp_path: Path
) -> None:
    """It loads the checkpoints of its own run: the other one may be gone."""
    shutil.rmtree(copy)
    run.remove(list(run.files()))
    with worker_folder(assignment, 0) as folder:
        store = folder.open_store(tmp_path / "run" / "checkpoints", repair=False)
        save_checkpoint(store, 60, small_contents(60))
        ((_, path),) = store.newest_first()
        with store.reading(path) as readable:
            load(readable)


def test_the_copy_of_a_node_is_removed_by_the_first_save(
    assignment: Assignment, copy: Path, tmp_path: Path
) -> None:
    listed = copy / "checkpoints" / NAME
    shutil.rmtree(copy)
    with worker_folder(assignment, 0) as folder:
        store = folder.open_store(tmp_path / "run" / "checkpoints", repair=False)
        with store.reading(listed) as path:
            store.part_folder("step")
            assert path.exists(), "another worker of the node still reads it"
        store.part_folder("step")
        assert not path.exists()


def test_a_run_that_begins_with_weights_keeps_its_other_settings(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = Config.of(init_from=str(copy), max_steps=7)
    assignment = assignment_of(config, None, remote_start(config), tmp_path / "run")
    with worker_folder(assignment, 0) as folder:
        found = folder.assignment.prepared
        assert found.earlier is None
        assert found.resolved.config == config.but(init_from=str(copy / "checkpoints" / NAME))
