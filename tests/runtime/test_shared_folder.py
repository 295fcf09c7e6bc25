"""Tests of the question whether the nodes see the driver's run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from orchestrator.errors import UserError
from orchestrator.runtime import shared_folder
from orchestrator.runtime.folder_server import DriverEnd
from orchestrator.storage.folder import RemoteFolder


def answering(
    monkeypatch: pytest.MonkeyPatch, sees_folder: list[bool], reasons: list[str], link: object = None
) -> None:
    """Let nodes answer the two questions of the driver."""

    def ask_nodes(_nodes: object, function: Callable[..., Any], *_: str) -> list[tuple[Any, Any]]:
        answers = sees_folder if function is shared_folder.sees_file else reasons
        return [({"NodeManagerAddress": f"10.0.0.{n}"}, answer) for n, answer in enumerate(answers)]

    monkeypatch.setattr(shared_folder, "_other_nodes", lambda kind: [])
    monkeypatch.setattr(shared_folder, "ask_nodes", ask_nodes)
    monkeypatch.setattr(shared_folder, "start_server", lambda *_: link)


def test_nodes_that_see_the_folder_are_not_linked(driver_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [True, True], ["unreachable"])
    assert shared_folder.open_link(driver_dir, RemoteFolder("memory://r"), gpu=False) is None


def test_one_node_that_does_not_see_the_folder_links_all(
    driver_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteFolder(f"memory://{uuid4().hex}")
    answering(monkeypatch, [True, False], ["", ""], link="server")
    assert shared_folder.open_link(driver_dir, remote, gpu=False) == DriverEnd(remote.url, "server")
    assert remote.files() == {}


def test_a_node_that_sees_neither_folder_ends_the_run_before_it_starts(
    driver_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, [False, False], ["", "NoCredentialsError: Unable to locate credentials"])
    with pytest.raises(UserError, match=r"node 10\.0\.0\.1 sees neither .* credentials of the storage"):
        shared_folder.open_link(driver_dir, RemoteFolder("memory://r"), gpu=False)


def test_a_node_tells_what_it_sees(driver_dir: Path, tmp_path: Path) -> None:
    nonce = str(driver_dir / "logs" / "nonce")
    assert shared_folder.sees_file(nonce, "this run")
    assert not shared_folder.sees_file(nonce, "another run")
    assert not shared_folder.sees_file(str(tmp_path / "nothing"), "this run")
    remote = RemoteFolder(f"file://{tmp_path}/remote")
    assert shared_folder.why_unreachable(remote.url, "this run") == "it is another folder there"
    remote.write(".reachable", b"this run")
    assert shared_folder.why_unreachable(remote.url, "this run") == ""
    assert "cannot read" in shared_folder.why_unreachable(f"file://{nonce}", "this run")
