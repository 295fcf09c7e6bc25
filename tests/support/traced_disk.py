"""What a process changes on disk below a folder, seen operation by operation: counted, recorded, and ended or refused at a chosen one.
Those of Python are seen by stand-ins for ``os`` and ``open``, with an audit hook that ends the process should one slip by; those of
safetensors, which writes from Rust, by doing in Python what it does there."""

from __future__ import annotations

import base64
import builtins
import errno
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROWS = {"mkdir", "open", "write", "truncate", "rename", "sync"}
"""What a full disk refuses. To remove is always allowed."""
_UNSEEN = 98


@dataclass(frozen=True)
class Fate:
    """``before`` or ``after`` operation ``at`` the process is killed; ``full once`` refuses this one operation for lack of room,
    ``full`` all that grow from there on, until the script has told of it. ``none`` lets it run to its end."""

    kind: str = "none"
    at: int = -1


@dataclass(frozen=True)
class Operation:
    """One change of the disk, paths relative to the folder; ``told`` is none, but the script's word that a step is safe."""

    kind: str
    path: str = ""
    to: str = ""
    data: str = ""
    at: int = 0

    @property
    def content(self) -> bytes:
        return base64.b64decode(self.data)


class Disk:
    """Stands between a process and what it changes below ``root``."""

    def __init__(self, root: Path, trace: int, fate: Fate, syncs: bool) -> None:
        self.root, self.trace, self.fate, self.syncs = str(root), trace, fate, syncs
        self.count, self.full, self.inside = 0, False, False
        self.real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "ftruncate", "mkdir", "rename", "unlink", "rmdir")
        }

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path relative to the root; None for one elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None and dir_fd >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        full = os.path.abspath(os.fsdecode(path))
        return (
            os.path.relpath(full, self.root)
            if full == self.root or full.startswith(self.root + os.sep)
            else None
        )

    def record(self, operation: Operation) -> None:
        self.real["write"](self.trace, (json.dumps(asdict(operation)) + "\n").encode())

    def do(self, operation: Operation, act: Callable[[], Any]) -> Any:
        number, self.count = self.count, self.count + 1
        if number == self.fate.at and self.fate.kind == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.full = self.full or (number == self.fate.at and self.fate.kind == "full")
        if (self.full and operation.kind in GROWS) or (
            number == self.fate.at and self.fate.kind == "full once"
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.inside = True
        try:
            result = act()
        except OSError:  # nothing was changed
            self.count -= 1
            raise
        finally:
            self.inside = False
        self.record(operation)
        if number == self.fate.at and self.fate.kind == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    # stand-ins

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self.below(path, dir_fd)
        if where is None or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return self.real["open"](path, flags, mode, dir_fd=dir_fd)
        return self.do(
            Operation("open", where, at=flags), lambda: self.real["open"](path, flags, mode, dir_fd=dir_fd)
        )

    def write(self, file: int, data: Any) -> int:
        where = self.below(file)
        if where is None:
            return self.real["write"](file, data)
        content = base64.b64encode(bytes(data)).decode()
        at = os.lseek(file, 0, os.SEEK_CUR)
        return self.do(Operation("write", where, data=content, at=at), lambda: self.real["write"](file, data))

    def fsync(self, file: int) -> None:
        where = self.below(file)
        if where is not None:
            self.do(Operation("sync", where), lambda: self.real["fsync"](file) if self.syncs else None)

    def ftruncate(self, file: int, length: int) -> None:
        self.do(
            Operation("truncate", str(self.below(file)), at=length),
            lambda: self.real["ftruncate"](file, length),
        )

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        where = self.below(path, dir_fd)
        if where is None:
            self.real["mkdir"](path, mode, dir_fd=dir_fd)
        else:
            self.do(Operation("mkdir", where), lambda: self.real["mkdir"](path, mode, dir_fd=dir_fd))

    def rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        old, new = self.below(source, src_dir_fd), self.below(target, dst_dir_fd)
        assert (old is None) == (new is None), (source, target)
        real = self.real["rename"]
        self.do(
            Operation("rename", old, new or ""), lambda: real(source, target)
        ) if old is not None else real(source, target)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", path, dir_fd)

    def _gone(self, kind: str, path: Any, dir_fd: int | None) -> None:
        where = self.below(path, dir_fd)
        if where is None:
            self.real[kind](path, dir_fd=dir_fd)
        else:
            self.do(Operation(kind, where), lambda: self.real[kind](path, dir_fd=dir_fd))

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        """``open``: for writing below the root, one whose bytes go through here."""
        if isinstance(file, int) or mode[0] not in "wxa" or self.below(file) is None:
            return _REAL_OPEN(file, mode, buffering, *more, **named)
        kind = {"w": os.O_TRUNC | os.O_CREAT, "x": os.O_EXCL | os.O_CREAT, "a": os.O_APPEND | os.O_CREAT}[
            mode[0]
        ]
        raw = _Raw(self, self.open(file, kind | os.O_WRONLY, 0o666))
        return (
            io.BufferedWriter(raw)
            if "b" in mode
            else io.TextIOWrapper(io.BufferedWriter(raw), *more, **named)
        )

    def save_tensors(self, tensors: Mapping[str, Any], path: Any) -> None:
        """What safetensors does: a file of the size, filled, renamed. Seen by ``strace``, and compared in a test of this file."""
        from safetensors import SafetensorError
        from safetensors.torch import save

        data, beside = save(dict(tensors)), Path(path).with_name(".tmpAbCdEf")
        try:
            file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(file, len(data))
                os.write(file, data[: len(data) // 2])
                os.write(file, data[len(data) // 2 :])
            finally:
                os.close(file)
            os.rename(beside, path)
        except OSError as error:
            if beside.exists():
                beside.unlink()
            raise SafetensorError(f"Error while serializing: {error}") from None

    def install(self) -> None:
        for name in self.real:
            setattr(os, name, getattr(self, name))
        os.replace, os.remove = self.rename, self.unlink
        io.open = builtins.open = self.open_file
        importlib.import_module("orchestrator.train.checkpoint.files").save_file = self.save_tensors  # pyright: ignore[reportAttributeAccessIssue]
        sys.addaudithook(self.notice)

    def notice(self, event: str, details: tuple[Any, ...]) -> None:
        """End the process where a change was not seen: the count would be wrong, and a test with it."""
        changes = event in _CHANGES or (
            event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (
            changes
            and not self.inside
            and isinstance(details[0], str | bytes | os.PathLike)
            and self.below(details[0]) is not None
        ):
            os.write(2, f"not seen: {event} {details}\n".encode())
            os._exit(_UNSEEN)


_REAL_OPEN = builtins.open
_CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.chmod",
}


class _Raw(io.FileIO):
    def __init__(self, disk: Disk, file: int) -> None:
        super().__init__(file, "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(self.fileno(), data)
