"""Fixtures of the security tests: a trained run, and a copy of it to attack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.storage.audit_writes import recorded_changes
from tests.security.scene import RUN, Scene, call, hashes_outside


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    code, output = call("train", *RUN, "--run-dir", str(folder), "--max-steps", "4")
    assert code == 0, output
    return folder


@pytest.fixture
def scene(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Yield a scene, and check afterwards that nothing was executed or written outside the working folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    scene = Scene(work / "run", tmp_path / "outside.safetensors", tmp_path / "canary")
    shutil.copytree(trained_run, scene.folder)
    # Drawing the pictures takes most of the time of a report.
    monkeypatch.setattr("orchestrator.report.run.page.draw_all", lambda *_: [])
    shutil.copy(scene.newest / "model_00000.safetensors", scene.outside)
    before = hashes_outside(tmp_path)
    with recorded_changes() as changed:
        yield scene
    assert not scene.canary.exists(), "something was executed"
    assert hashes_outside(tmp_path) == before, "a file outside the working folder was changed"
    assert not [path for path in changed if not path.is_relative_to(tmp_path)], (
        "another folder was written to"
    )
