"""Tests of the checkpoint of another remote run that a run begins with: what is downloaded, what is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.storage.checkpoints import remote_run_with_checkpoints
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints
from orchestrator.train.remote.remote_start import downloaded_start, remote_start


@pytest.fixture
def run(tmp_path: Path) -> RemoteFolder:
    """A remote run with the checkpoints of steps 20 and 40."""
    remote = remote_run_with_checkpoints(tmp_path / "written")
    for name in ("events.jsonl", "config.yaml", "hf/config.json", "plan.json"):
        remote.write(name, b"{}")
    return remote


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "results"
    yield folder
    assert not list(folder.glob("*")), "a copy was not removed"


def begin(results: Path, url: str, flag: str = "--resume") -> tuple[Path, list[str]]:
    """Download a start, and verify it. Return its path below the results, and the notes for the screen."""
    notes: list[str] = []
    with downloaded_start(flag, url, results, notes.append) as path:
        store = CheckpointStore(path / "checkpoints", repair=False)
        checkpoints = [other for _, other in store.newest_first()] or [path]
        load(checkpoints[0])
        return checkpoints[0], notes


def refused(results: Path, url: str, flag: str = "--resume") -> str:
    """Return the message of a start that cannot be: one line."""
    with pytest.raises(UserError) as raised:
        begin(results, url, flag)
    message = str(raised.value)
    assert message.startswith(f"{flag} "), message
    assert "\n" not in message
    assert ".downloaded-" not in message
    return message


def refused_at_once(results: Path, url: str, flag: str = "--resume") -> str:
    """Return the message of a start that is refused before anything is created."""
    message = refused(results, url, flag)
    assert not results.exists()
    return message


@pytest.mark.parametrize(
    ("name", "step"),
    [("", 40), ("/checkpoints/step_00000020", 20), ("/checkpoints/step_00000040", 40)],
)
def test_the_newest_checkpoint_or_the_one_that_is_named_is_downloaded(
    run: RemoteFolder, results: Path, name: str, step: int
) -> None:
    path, notes = begin(results, f"{run.url}{name}")
    assert (path.name, notes) == (f"step_{step:08d}", [])


def test_a_step_is_named_without_the_number_of_its_save(run: RemoteFolder, results: Path) -> None:
    """Nodes without a shared disk give each save a number of its own."""
    checkpoints = run / "checkpoints"
    for name in list(checkpoints.files()):
        if name.startswith("step_00000040/"):
            checkpoints.write(name.replace("/", ".1763370000000000/"), checkpoints.read(name, 2**24) or b"")
    RemoteCheckpoints(checkpoints)._remove("step_00000040")
    for given in ("step_00000040", "step_00000040.1763370000000000"):
        path, _ = begin(results, f"{run.url}/checkpoints/{given}")
        assert path.name == "step_00000040"
    assert "the run has no such checkpoint" in refused(results, f"{run.url}/checkpoints/step_00000040.7")


def test_a_damaged_checkpoint_is_passed_over_and_told(run: RemoteFolder, results: Path) -> None:
    run.write("checkpoints/step_00000040/state.json", b"damaged")
    path, notes = begin(results, run.url)
    assert path.name == "step_00000020"
    assert notes[0].startswith(f"warning: skipped checkpoint step_00000040 of {run.url}: ")
    message = refused(results, f"{run.url}/checkpoints/step_00000040", "--init-from")
    assert "the checkpoint is damaged (step_00000040: " in message
    run.write("checkpoints/step_00000020/state.json", b"damaged")
    assert "all 2 checkpoints are damaged (step_00000040: " in refused(results, run.url)


@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(
    run: RemoteFolder, results: Path, flag: str
) -> None:
    assert refused_at_once(results, f"{run.url}/checkpoints/step_00000030", flag) == (
        f"{flag} {run.url}/checkpoints/step_00000030: the run has no such checkpoint; it has step_00000040, "
        f"step_00000020. Give one of them, or {run.url} for the newest"
    )


def test_a_place_without_a_run_is_told_with_what_was_found(run: RemoteFolder, results: Path) -> None:
    nothing = f"memory://{uuid4().hex}/run2"
    advice = "give a run (s3://bucket/run1) or one of its checkpoints"
    message = refused_at_once(results, nothing)
    assert message.startswith(f"--resume {nothing}: there is nothing; {advice}")
    message = refused_at_once(results, f"{nothing}/checkpoints/step_00000040")
    assert f"there is nothing at {nothing}; {advice}" in message
    assert "there is no run, but 8 other files; give a run" in refused_at_once(
        results, f"{run.url}/checkpoints"
    )
    RemoteFolder(nothing).write("events.jsonl", b"")
    assert "a run without a checkpoint so far, of 1 file" in refused_at_once(results, nothing)


@pytest.mark.parametrize("url", ["memory://step_00000040", "memory://elsewhere/step_00000040"])
def test_a_checkpoint_outside_of_a_run_is_told(results: Path, url: str) -> None:
    assert "it is not in the folder checkpoints of a run; give a run" in refused_at_once(results, url)


def test_a_storage_that_refuses_is_told_with_what_to_do(
    run: RemoteFolder, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    message = refused_at_once(results, run.url)
    assert "PermissionError: Access Denied. Check the name of the bucket and that your credentials" in message


def test_workers_get_the_checkpoint_and_the_small_files_of_the_run(run: RemoteFolder, results: Path) -> None:
    for flag, setting in (("--resume", "resume"), ("--init-from", "init_from")):
        for url in (run.url, f"{run.url}/checkpoints/step_00000040"):
            with downloaded_start(flag, url, results, print) as path:
                config = Config.of(**{setting: str(path)})
                start = remote_start(config)
                assert start is not None
                assert (start.url, start.checkpoint.name) == (run.url, "step_00000040")
                assert start.path.is_dir()
                assert start.files["remote"] == f"{url}\n".encode()
                names = {"start.json", "remote", "config.yaml", "plan.json", "hf/config.json"}
                assert start.files.keys() == names | {"checkpoints/step_00000040/manifest.json"}


def test_other_starts_are_none(tmp_path: Path) -> None:
    for settings in ({}, {"resume": "auto"}, {"resume": str(tmp_path)}, {"init_from": str(tmp_path)}):
        assert remote_start(Config.of(**settings)) is None
