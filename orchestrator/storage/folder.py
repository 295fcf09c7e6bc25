"""A remote folder: objects below an address, written and read through fsspec, and again after failures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from orchestrator.errors import OrchestratorError, UserError
from orchestrator.redaction import mask
from orchestrator.storage.address import as_url, check_address, scheme_of
from orchestrator.storage.local_files import copy_file, find_files, remove_empty, replace_file
from orchestrator.types import first_line

_PART_BYTES = 2**24
_MAX_PARTS = 10_000
"""Limit of an object of S3. Files above 156 GiB need larger parts."""
_PART_UNIT_BYTES = 2**20
_NUM_PARTS_AT_ONCE = 4
_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_MAX_ERROR_CHARACTERS = 300
_PROBE = ".writable"
_SAFE_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "file": {},
    "memory": {},
    # Listings must show what other machines have written since.
    "gs": {"use_listings_cache": False},
    "s3": {
        "use_listings_cache": False,
        "max_concurrency": _NUM_PARTS_AT_ONCE,
        "config_kwargs": {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS},
    },
}


class RemoteError(OrchestratorError):
    """The storage refused an operation or did not answer. The message has no secret."""


class RemoteFolder:
    """The objects below an address. Names are relative to it, with slashes."""

    def __init__(self, location: str | Path, files: Any = None) -> None:
        """``location`` has passed ``check_address``; ``files`` is the file system of a parent folder."""
        url = as_url(location)
        assert url is not None, location
        self.url = url
        self._scheme = scheme_of(url)
        self._files = files or self._open()
        self._root = str(self._files._strip_protocol(url)).rstrip("/")

    def _open(self) -> Any:
        import fsspec

        with self._errors("open"):
            # fsspec's own cache would not see credentials that have changed.
            return fsspec.filesystem(self._scheme, skip_instance_cache=True, **_OPTIONS[self._scheme])

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}", self._files)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rstrip("/").rpartition("/")[2]

    def check_writable(self) -> None:
        """Write and remove an object. Raises ``RemoteError``."""
        self.write(_PROBE, b"writable")
        self.remove([_PROBE])

    def files(self) -> dict[str, str]:
        """Return every object below the address: its name, and a text that changes with its content.

        The text begins with the size. Names that could not be paths below a local folder are left out."""
        with self._errors("list"):
            found = self._find()
        names = {str(path).removeprefix(f"{self._root}/"): info for path, info in found.items()}
        return {name: _version(info) for name, info in names.items() if is_safe_name(name)}

    def _find(self) -> dict[str, dict[str, Any]]:
        if self._scheme == "file":
            return find_files(Path(self._root))
        try:
            return self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}

    def version(self, name: str) -> str:
        """Return a text that begins with the size of an object and changes with its content."""
        path = self._path(name)
        with self._errors(f"read {name} of"):
            return _version(self._files.info(path))

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of an object, cut at ``max_bytes``; None if there is none.

        Raises ``RemoteError`` if the storage does not say which."""
        path = self._path(name)
        with self._errors(f"read {name} of"), suppress(FileNotFoundError):
            # Not isfile: after any error it says that there is no such file.
            if self._files.info(path)["type"] == "file":
                with self._files.open(path, "rb") as file:
                    return bytes(file.read(max_bytes))
        return None

    def size(self, name: str) -> int | None:
        """Return the number of bytes of an object; None if there is none."""
        path = self._path(name)
        with self._errors(f"read {name} of"), suppress(FileNotFoundError):
            return int(self._files.info(path)["size"])
        return None

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes of an object from ``begin`` to ``end``; fewer if it has become shorter."""
        with self._errors(f"read {name} of"):
            return bytes(self._files.cat_file(self._path(name), start=begin, end=end))

    def open(self, name: str) -> Any:
        """Open an object for reading bytes in pieces; reads may raise the errors of the storage's library."""
        with self._errors(f"read {name} of"):
            return self._files.open(self._path(name), "rb")

    def write(self, name: str, content: bytes) -> None:
        """Write an object. It is there as a whole, or as it was, once this returns or fails."""
        with self._errors(f"write {name} to"):
            if self._scheme == "file":
                replace_file(Path(self._path(name)), content)
            else:
                self._files.pipe_file(self._path(name), content)

    def upload(self, source: Path, name: str, on_part: Callable[[], None] = lambda: None) -> None:
        """Copy a local file. The object is there as a whole, or as it was, once this returns or fails.

        ``on_part`` is called for each part that is there; an error of its own ends the upload."""
        # Others than object stores have no parts.
        has_parts = self._scheme in ("s3", "gs")
        with self._errors(f"write {name} to"):
            options = {"chunksize": _part_bytes(source.stat().st_size)} if has_parts else {}
            if self._scheme == "file":
                copy_file(source, Path(self._path(name)))
            else:
                callback = _callback(on_part)
                self._files.put_file(str(source), self._path(name), callback=callback, **options)

    def download(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"read {name} of"):
            self._files.get_file(self._path(name), str(target))

    def remove(self, names: list[str]) -> None:
        """Remove objects in this order. One that is gone already is no error."""
        for name in names:
            with self._errors(f"remove {name} of"), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))
            if self._scheme == "file":
                remove_empty(Path(self._path(name)).parent)

    def _path(self, name: str) -> str:
        assert is_safe_name(name), name
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Raise every error of the storage's library as ``RemoteError``: each library has its own."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error, _MAX_ERROR_CHARACTERS)}"
            raise RemoteError(mask(f"cannot {action} {self.url}: {reason}")) from None


def _part_bytes(file_bytes: int) -> int:
    """Return the size of the parts of a file: as small as their number allows, because some are in memory."""
    units = -(-file_bytes // (_MAX_PARTS * _PART_UNIT_BYTES))
    return max(_PART_BYTES, units * _PART_UNIT_BYTES)


def open_folder(name: str, location: str | Path) -> RemoteFolder:
    """Return the remote folder of a setting or argument. Raises ``UserError`` if it cannot be used."""
    try:
        check_address(name, location)
    except ValueError as error:
        raise UserError(str(error)) from None
    return RemoteFolder(location)


def open_parent(name: str, location: str | Path) -> tuple[RemoteFolder, str]:
    """Return the folder that an address lies in, and the name there; for a bucket itself and ''."""
    parent, _, last = str(as_url(location)).rpartition("/")
    return (open_folder(name, location), "") if parent.endswith(":/") else (open_folder(name, parent), last)


def _callback(on_part: Callable[[], None]) -> Any:
    """Return fsspec's callback that calls a function for each part of a file."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"part": lambda size, value, **_: on_part()})  # noqa: ARG005


def _version(info: Mapping[str, Any]) -> str:
    """Return the size of an object with its hash or time, under the names of each library."""
    marks = (info.get(key) for key in ("ETag", "md5Hash", "mtime", "created"))
    return f"{info.get('size')} {next((mark for mark in marks if mark), '')}"


def is_safe_name(name: str) -> bool:
    """Whether the name of an object may become a path below a local folder."""
    parts = name.split("/")
    return all(_SAFE_NAME.fullmatch(part) and part not in (".", "..") for part in parts)


TRIES = 6
_FIRST_WAIT_SECONDS = 1.0
_MAX_WAIT_SECONDS = 60.0

T = TypeVar("T")


def retried(
    action: Callable[[], T],
    on_wait: Callable[[], None] = lambda: None,
    errors: type[Exception] = RemoteError,
) -> T:
    """Carry out an action, again after failures: six times in all. Raises its last error.

    ``on_wait`` is called after each of the first failures, and may raise an error of its own. Only
    ``errors`` are worth another try."""
    for num_failures in range(1, TRIES):
        try:
            return action()
        except errors:
            on_wait()
        sleep(wait_seconds(num_failures))
    return action()


def wait_seconds(num_failures: int) -> float:
    """Return how long to wait after so many failures in a row: 1, 2, 4 seconds and so on, up to a minute."""
    return min(_MAX_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (num_failures - 1))
