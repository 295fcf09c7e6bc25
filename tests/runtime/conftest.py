"""Fixtures of links between run folders: the driver's folder, and a server of it without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.storage.folder_links import WAIT_S, ServerHandle, without_ray
from orchestrator.runtime import folder_link


@pytest.fixture
def driver_dir(tmp_path: Path) -> Path:
    """The driver's run folder at the start of a run."""
    run_dir = tmp_path / "driver"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "nonce").write_text("this run")
    (run_dir / "events.jsonl").touch()
    (run_dir / "plan.json").write_text('{"batch_size": 8}')
    return run_dir


@pytest.fixture
def server(driver_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServerHandle:
    """The server of the driver's run folder. Links call it without Ray, and flush for as long as needed."""
    monkeypatch.setattr(folder_link, "_FLUSH_SECONDS", WAIT_S)
    monkeypatch.setattr(folder_link, "ray", without_ray())
    return ServerHandle(driver_dir)
