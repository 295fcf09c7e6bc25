"""Local copies of remote data: a folder or a file that a task reads, and small files.

There is one copy for each state of the remote folder; the processes of a machine share it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.cache import cached_folder
from orchestrator.storage.folder import RemoteFolder, open_folder, open_parent

_MAX_SMALL_FILE_BYTES = 2**26


def local_copy(name: str, location: str | Path) -> Path:
    """Return a local copy of a remote folder or file; ``name`` is the setting, for messages.

    Raises ``UserError`` if there is nothing."""
    folder, file = _folder_and_file(name, location)
    files = folder.files()
    if file:
        files = {other: version for other, version in files.items() if other == file}
    if not files:
        raise UserError(f"{name} {as_url(location)}: there is nothing; give a folder or a file with data")
    key = hashlib.sha256(json.dumps([as_url(location), files], sort_keys=True).encode()).hexdigest()
    copy = cached_folder(key, lambda target: _download(folder, list(files), target))
    return copy / file if file else copy


def read_file(name: str, location: str | Path) -> bytes:
    """Return the content of a small file, local or remote. Raises ``OSError`` or ``RemoteError``."""
    if as_url(location) is None:
        return Path(location).read_bytes()
    folder, file = open_parent(name, location)
    content = folder.read(file, _MAX_SMALL_FILE_BYTES)
    if content is None:
        raise FileNotFoundError(f"there is no {as_url(location)}")
    return content


def _folder_and_file(name: str, location: str | Path) -> tuple[RemoteFolder, str]:
    """Return the folder of an address; for the address of a file also the name of the file."""
    folder, file = open_parent(name, location)
    is_file = bool(file) and folder.read(file, 1) is not None
    return (folder, file) if is_file else (open_folder(name, location), "")


def _download(folder: RemoteFolder, names: list[str], target: Path) -> None:
    for file in names:
        folder.download(file, target / file)
