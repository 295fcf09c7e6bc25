"""The commit of the code that a run is started from, read from git's own files.

No git is started: its configuration can name programs to run, and the folder may be another person's.
"""

from __future__ import annotations

import re
from pathlib import Path

MAX_BYTES = 2**22
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def git_commit(folder: Path) -> str | None:
    """Return the commit that the repository around a folder has checked out; None without one."""
    folder = folder.absolute()
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_dir():
            return _head_commit(git)
        # In a worktree and in a submodule, .git is a file that names git's folder.
        target = _text(git).partition("gitdir: ")[2].strip()
        if target:
            return _head_commit(parent / target)
    return None


def _head_commit(git: Path) -> str | None:
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref: "):
        return _commit(head)
    name = head.removeprefix("ref: ").strip()
    # The branches of a worktree are those of the repository that it belongs to.
    common = git / (_text(git / "commondir").strip() or ".")
    return _commit(_text(common / name)) or _packed_commit(_text(common / "packed-refs"), name)


def _packed_commit(text: str, name: str) -> str | None:
    """Return the commit of a branch that git keeps in a file of many."""
    lines = [line.split() for line in text.splitlines()]
    return next((_commit(words[0]) for words in lines if len(words) == 2 and words[1] == name), None)


def _commit(text: str) -> str | None:
    found = text.strip()
    return found if _COMMIT.fullmatch(found) else None


def _text(path: Path) -> str:
    """Return the content of a small file; empty if it cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
