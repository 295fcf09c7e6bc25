"""Tests of the commit of the current folder, against git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.plan.inventory.commit import git_commit

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    names = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CEILING_DIRECTORIES": "/"}
    people = ("-c", "user.name=someone", "-c", "user.email=someone")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *people, *arguments]
    return subprocess.run(
        command, env=clean | names, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "deep" / "down").mkdir(parents=True)
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "one")
    return folder


@needs_git
def test_the_commit_is_found_from_any_folder_of_a_repository(repository: Path) -> None:
    expected = git(repository, "rev-parse", "HEAD")
    assert git_commit(repository) == git_commit(repository / "deep" / "down") == expected


@needs_git
def test_packed_branches_detached_heads_and_worktrees_are_read(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
    git(tmp_path / "side", "commit", "--quiet", "--allow-empty", "--message", "two")
    second = git(tmp_path / "side", "rev-parse", "HEAD")
    git(repository, "pack-refs", "--all")
    assert git_commit(repository) == first
    assert git_commit(tmp_path / "side") == second
    git(repository, "checkout", "--quiet", "--detach", second)
    assert git_commit(repository) == second


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "ref: /etc/passwd", "no commit", "\xff"])
def test_a_damaged_repository_has_no_commit(tmp_path: Path, head: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(head, encoding="latin-1")
    assert git_commit(tmp_path) is None
