"""The record of a run in a remote folder: events, settings, plan, summary, report, logs.

Everything in the run folder except its checkpoints is copied there. What a resumed run needs of it
is downloaded again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteFolder, is_safe_name, open_folder

EVENTS = "events.jsonl"
_NEEDED = re.compile(
    r"events(\.driver)?\.jsonl|config(\.\d{3})?\.yaml|(plan|summary|manifest)\.json"
    r"|hf/(\w[\w.-]*\.(json|txt|model|jinja|tiktoken)|LICENSE(\.(md|txt))?)",
    re.ASCII,
)
"""Of the model's files, data alone: no code and no pickles."""
_LEFT_OUT = ("checkpoints", "remote", "logs/ray_train", "events_index")
_LEFT_OUT_NAMES = re.compile(r"\..*|.*\.pid|nonce|stop|sock", re.ASCII)
_INTERVAL_SECONDS = 10.0
_MAX_SHARE = 0.05
"""The share of the time that uploads of a growing record may take."""


class RecordUpload:
    """Uploads the files of a run folder that have changed since the last time."""

    def __init__(self, local: Path, remote: RemoteFolder) -> None:
        self._local = local
        self._remote = remote
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of each file when it was uploaded."""
        self._next_s = 0.0

    def is_due(self) -> bool:
        return monotonic() >= self._next_s

    def upload(self, with_logs: bool = False) -> None:
        """Upload. ``with_logs`` once the run has ended: the output of programs is masked only then."""
        began_s = monotonic()
        for name, path in _files(self._local):
            if name.startswith("logs/") and not with_logs:
                continue
            with suppress(FileNotFoundError):  # replaced meanwhile, and uploaded the next time
                version = _version(path)
                if self._seen.get(name) != version:
                    self._remote.upload(path, name)
                    self._seen[name] = version
        # An object is written as a whole: the longer the events, the rarer they are uploaded.
        took_s = monotonic() - began_s
        self._next_s = monotonic() + max(_INTERVAL_SECONDS, took_s / _MAX_SHARE)

    def not_uploaded(self) -> list[str]:
        """Return the files whose present content is not in the remote folder, once the run has ended."""
        return [name for name, path in _files(self._local) if self._seen.get(name) != _version(path)]


def download_record(remote: RemoteFolder, local: Path) -> None:
    """Download the files that a resumed run or a report needs."""
    for name in remote.files():
        if is_needed(name):
            remote.download(name, local / name)


def is_needed(name: str) -> bool:
    """Whether a resumed run or a report reads a file of the record."""
    return _NEEDED.fullmatch(name) is not None


@contextmanager
def local_record(location: str | Path) -> Iterator[Path]:
    """Yield a run folder to read: the one on the disk, or a copy of the record of a remote one."""
    if as_url(location) is None:
        yield Path(location)
        return
    remote = open_folder("the run folder", location)
    with TemporaryDirectory() as folder:
        download_record(remote, Path(folder))
        yield Path(folder)


def holds_record(remote: RemoteFolder) -> bool:
    """Whether a run has been recorded in the remote folder."""
    return remote.read(EVENTS, 1) is not None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the regular files to upload, without hidden ones and links."""
    for parent, folders, files in os.walk(folder):
        base = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not _is_left_out((base / name).as_posix())]
        for file in sorted(files):
            name = (base / file).as_posix()
            path = folder / name
            if not _is_left_out(name) and path.is_file() and not path.is_symlink():
                yield name, path


def _version(path: Path) -> tuple[int, int]:
    """Return size and time of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_left_out(name: str) -> bool:
    last_part = name.rpartition("/")[2]
    return name in _LEFT_OUT or bool(_LEFT_OUT_NAMES.fullmatch(last_part)) or not is_safe_name(name)
