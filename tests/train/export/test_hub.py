"""Tests of the upload to the hub, with a hub that only takes notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from orchestrator.errors import UserError
from orchestrator.train.export.folder import check_push, push

TOKEN = "hf_abracadabra"


class NotedHub:
    """The two calls of ``HfApi`` that an upload needs, with their signatures."""

    calls: list[tuple[str, dict[str, Any]]]
    error: Exception | None

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> huggingface_hub.RepoUrl:
        NotedHub.calls.append(("create", {"repo": repo_id, "private": private, "exist_ok": exist_ok}))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/mine/{repo_id.rpartition('/')[2]}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if NotedHub.error is not None:
            raise NotedHub.error
        names = sorted(path.name for path in folder_path.iterdir())
        NotedHub.calls.append(("upload", {"repo": repo_id, "files": names, "message": commit_message}))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[NotedHub]:
    NotedHub.calls = []
    NotedHub.error = None
    monkeypatch.setattr(huggingface_hub, "HfApi", NotedHub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    return NotedHub


def test_a_folder_becomes_one_commit_of_a_private_model(hub: type[NotedHub], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    check_push("tuned")
    assert push(tmp_path, "tuned", "the adapters") == "https://huggingface.co/mine/tuned"
    create, upload = hub.calls
    assert create == ("create", {"repo": "tuned", "private": True, "exist_ok": True})
    noted = {"repo": "mine/tuned", "files": ["model.safetensors"], "message": "Upload the adapters"}
    assert upload == ("upload", noted)


def test_a_failed_upload_names_the_folder_and_no_token(hub: type[NotedHub], tmp_path: Path) -> None:
    hub.error = OSError(f"403 Forbidden for Bearer {TOKEN}\nmore")
    with pytest.raises(UserError, match="the upload failed: 403 Forbidden for Bearer") as caught:
        push(tmp_path, "mine/tuned", "the weights")
    assert TOKEN not in str(caught.value)
    assert f"hf upload mine/tuned {tmp_path}" in str(caught.value)


def test_a_bad_id_and_a_missing_token_are_told_before_the_export(
    hub: type[NotedHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--push a/b/c: .+ give organisation/name"):
        check_push("a/b/c")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="needs a token, and there is none; run hf auth login"):
        check_push("mine/tuned")
    assert not hub.calls
