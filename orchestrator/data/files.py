"""Files of data, local or remote: found by name, by pattern or by folder, opened for reading, and
mapped into memory where they hold tokens."""

from __future__ import annotations

import glob
import gzip
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteError, open_folder, open_parent

_WILDCARDS = "*?["
Files = str | Path | Sequence[str | Path]
"""A file, a folder, a pattern such as ``data/*.jsonl``, an address of one of these, or several."""


def find_data_files(files: Files, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files in their order: as given; those of a pattern or a folder by name.

    Raises ``UserError`` if one of the entries holds no file.
    """
    entries = [files] if isinstance(files, str | Path) else list(files)
    if not entries:
        raise UserError("the list of data files is empty; at least one file is needed")
    return [found for entry in entries for found in _find(str(entry), suffixes)]


def is_pattern(entry: str) -> bool:
    return any(character in entry for character in _WILDCARDS)


def endings_text(suffixes: tuple[str, ...]) -> str:
    """Return the endings of data files for people; packed ones are named once."""
    plain = [suffix for suffix in suffixes if not suffix.endswith(".gz")]
    packed = " (or .gz of them)" if len(plain) < len(suffixes) else ""
    return ", ".join(plain) + packed


def open_data_file(file: str) -> Any:
    """Open a file for reading bytes; raises ``UserError`` if that is impossible."""
    url = as_url(file)
    try:
        if url is None:
            opened: Any = Path(file).open("rb")  # noqa: SIM115
        else:
            parent, name = open_parent("data", url)
            opened = parent.open(name)
        # Offsets are those of the text inside; a seek reads up to them.
        return gzip.open(opened, "rb") if file.endswith(".gz") else opened
    except (OSError, RemoteError) as error:
        raise UserError(f"cannot read the data file {file}: {_reason(error)}") from None


def data_file_version(file: str) -> str:
    """Return a text that changes with the content of a file: its size with its time or hash."""
    url = as_url(file)
    try:
        if url is None:
            status = Path(file).stat()
            return f"{status.st_size} {status.st_mtime_ns}"
        parent, name = open_parent("data", url)
        return parent.version(name)
    except (OSError, RemoteError) as error:
        raise UserError(f"cannot read the data file {file}: {_reason(error)}") from None


def data_file_size(file: str) -> int:
    """Return the bytes of a file; 0 where the storage does not say."""
    size = data_file_version(file).partition(" ")[0]
    return int(size) if size.isdecimal() else 0


def _find(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    found = _find_remote(entry, suffixes) if as_url(entry) is not None else _find_local(entry, suffixes)
    if not found:
        kinds = endings_text(suffixes)
        raise UserError(f"there is no data file {entry}; a file, a pattern or a folder of {kinds} was needed")
    return found


def _find_local(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    path = Path(entry).expanduser().absolute()
    if path.is_dir():
        return _of_kind((str(file) for file in path.iterdir() if file.is_file()), suffixes)
    if path.exists():
        return [str(path)]
    return sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())


def _find_remote(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    url = str(as_url(entry))
    try:
        if is_pattern(url):
            return _matching(url)
        parent, name = open_parent("data", url)
        with suppress(RemoteError):
            if name and parent.read(name, 1) is not None:
                return [url]
        folder = open_folder("data", url)
        return _of_kind((f"{folder.url}/{file}" for file in folder.files() if "/" not in file), suffixes)
    except RemoteError as error:
        raise UserError(f"cannot list the data files of {entry}: {_reason(error)}") from None


def _matching(url: str) -> list[str]:
    """Return the objects that match a pattern; the folder before the first wildcard is listed."""
    first = min(url.index(character) for character in _WILDCARDS if character in url)
    root = url[:first].rpartition("/")[0]
    folder = open_folder("data", root)
    return sorted(f"{root}/{file}" for file in folder.files() if fnmatch(f"{root}/{file}", url))


def _of_kind(files: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    return sorted(file for file in files if file.endswith(suffixes))


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def map_tokens(file: Path, dtype: str) -> np.ndarray:
    """Map the tokens of a file. ``dtype`` is that of a ``.bin`` file; a ``.npy`` file tells its own.

    Raises ``UserError`` if the file holds something else."""
    try:
        if file.suffix != ".npy":
            return np.memmap(file, dtype=dtype, mode="r")
        tokens = np.lib.format.open_memmap(file, mode="r")  # refuses pickled objects
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the tokens of {file} as {dtype}: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise UserError(
            f"{file} holds {tokens.dtype} of shape {tokens.shape}; one row of whole numbers was needed"
        )
    return tokens
