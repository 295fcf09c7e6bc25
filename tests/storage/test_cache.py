"""Tests of the cache of folders: written whole, kept while they are used, and bounded by the free disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orchestrator.storage import cache
from orchestrator.storage.cache import cached_folder

DISK_BYTES = 7000


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache on a small disk."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "expert-orchestrator"

    def usage(_: Path) -> Usage:
        return Usage(DISK_BYTES - sum(path.stat().st_size for path in folder.rglob("*/*")))

    monkeypatch.setattr(cache.shutil, "disk_usage", usage)
    return folder


def thousand_bytes(folder: Path) -> None:
    (folder / "data").write_bytes(bytes(1000))


def leave(*names: str) -> None:
    """End the use of folders, as the end of a process does."""
    for folder in [folder for folder in cache._in_use if folder.name in names]:
        cache._in_use.pop(folder).close()


def use(*names: str) -> None:
    """Get folders one after the other, with times of use that differ."""
    for name in names:
        folder = cached_folder(name, thousand_bytes)
        newest = max(path.stat().st_mtime for path in folder.parent.glob("*.used"))
        os.utime(folder.with_suffix(".used"), (newest + 1, newest + 1))


def folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def test_the_least_recently_used_folders_make_room(root: Path) -> None:
    use("a", "b", "c", "a")
    leave("a", "b", "c")
    use("d", "e")
    assert folders(root) == {"a", "d", "e"}
    leave("a", "d", "e")


def test_a_folder_in_use_is_kept(root: Path) -> None:
    use("a", "b", "c", "d", "e")
    assert folders(root) == {"a", "b", "c", "d", "e"}
    leave("b", "c", "d", "e")
    use("f")
    assert "a" in folders(root)
    leave("a", "f")


def test_a_folder_that_another_process_has_written_is_kept_while_it_is_used(root: Path) -> None:
    use("a")
    leave("a")
    use("a", "b", "c", "d", "e")
    assert "a" in folders(root)
    leave("a", "b", "c", "d", "e")


def test_remains_of_a_killed_writer_go_first(root: Path) -> None:
    def killed(folder: Path) -> None:
        thousand_bytes(folder)
        raise KeyboardInterrupt

    use("a", "b", "c")
    leave("a", "b", "c")
    with pytest.raises(KeyboardInterrupt):
        cached_folder("x", killed)
    assert folders(root) == {"a", "b", "c", "x.part"}
    use("d")
    assert folders(root) == {"b", "c", "d"}
    leave("d")


def test_the_bytes_of_a_folder_are_on_the_disk_before_it_has_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *rest: (done.append(f"{name} {Path(path).name}"), function(path, *rest))[1]

    monkeypatch.setattr(cache, "sync", noted("sync", cache.sync))
    monkeypatch.setattr(cache.os, "rename", noted("rename", os.rename))

    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "one").touch()
        (folder / "two").touch()

    cached_folder("key", write)
    assert done[-2:] == ["rename key.part", f"sync {root.name}"]
    assert set(done[:-2]) == {"sync one", "sync deep", "sync two", "sync key.part"}
    leave("key")
    shutil.rmtree(root)
