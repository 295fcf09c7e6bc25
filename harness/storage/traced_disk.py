"""A process's changes below a folder: counted, recorded, and killed or refused at a chosen one.

Python's own operations are seen by replacements of ``os`` functions and ``open``; an audit hook
ends the process if one slips by. Several threads may change the disk: they do so in turn."""

from __future__ import annotations

import base64
import builtins
import errno
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NEEDS_SPACE = {"mkdir", "open", "write", "truncate", "rename", "sync"}
"""Operations that a full disk refuses. Removing is always allowed."""
_UNTRACED_EXIT_CODE = 98
_REPLACED = ("open", "write", "fsync", "ftruncate", "mkdir", "rename", "unlink", "rmdir")
_OPEN_FLAGS = {
    "w": os.O_TRUNC | os.O_CREAT,
    "x": os.O_EXCL | os.O_CREAT,
    "a": os.O_APPEND | os.O_CREAT,
}
_CHANGING_EVENTS = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.chmod",
}
_REAL_OPEN = builtins.open


@dataclass(frozen=True)
class DiskFault:
    """What happens at operation number ``at``.

    ``before`` and ``after`` kill the process there. ``full once`` refuses that operation for
    lack of space; ``full`` refuses all operations that need space from there on, until the
    script has reported the failure. ``none`` lets the process run to its end."""

    kind: str = "none"
    at: int = -1


@dataclass(frozen=True)
class Operation:
    """One change of the disk, with paths relative to the folder.

    The kind ``acknowledged`` changes nothing: the script says that a step is safe."""

    kind: str
    path: str = ""
    target: str = ""
    data: str = ""
    number: int = 0
    """The flags of an open, the offset of a write, or the length of a truncate."""

    @property
    def content(self) -> bytes:
        return base64.b64decode(self.data)


class TracedDisk:
    """Replaces the functions by which a process changes files below ``root``."""

    def __init__(self, root: Path, trace: int, fault: DiskFault, syncs: bool) -> None:
        self.root = str(root)
        self.trace = trace
        self.fault = fault
        self.syncs = syncs
        self.count = 0
        self.full = False
        self.performing = False
        self.lock = threading.Lock()
        self.real = {name: getattr(os, name) for name in _REPLACED}

    def relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path relative to the root, or None for a path elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None and dir_fd >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        full = os.path.abspath(os.fsdecode(path))
        if full != self.root and not full.startswith(self.root + os.sep):
            return None
        return os.path.relpath(full, self.root)

    def record(self, operation: Operation) -> None:
        self.real["write"](self.trace, (json.dumps(asdict(operation)) + "\n").encode())

    def perform(self, operation: Operation, action: Callable[[], Any]) -> Any:
        """Perform an operation and record it, or let the fault strike."""
        with self.lock:
            return self._perform(operation, action)

    def _perform(self, operation: Operation, action: Callable[[], Any]) -> Any:
        struck = self.fault.kind if self.count == self.fault.at else ""
        self.count += 1
        if struck == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.full = self.full or struck == "full"
        if struck == "full once" or (self.full and operation.kind in NEEDS_SPACE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.performing = True
        try:
            result = action()
        except OSError:
            self.count -= 1  # nothing was changed
            raise
        finally:
            self.performing = False
        self.record(operation)
        if struck == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    # Replacements of functions of ``os``

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def action() -> int:
            return self.real["open"](path, flags, mode, dir_fd=dir_fd)

        relative = self.relative(path, dir_fd)
        if relative is None or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return action()
        return self.perform(Operation("open", relative, number=flags), action)

    def write(self, file: int, data: Any) -> int:
        relative = self.relative(file)
        if relative is None:
            return self.real["write"](file, data)
        content = base64.b64encode(bytes(data)).decode()
        offset = os.lseek(file, 0, os.SEEK_CUR)
        operation = Operation("write", relative, data=content, number=offset)
        return self.perform(operation, lambda: self.real["write"](file, data))

    def fsync(self, file: int) -> None:
        relative = self.relative(file)
        if relative is not None:
            operation = Operation("sync", relative)
            self.perform(operation, lambda: self.real["fsync"](file) if self.syncs else None)

    def ftruncate(self, file: int, length: int) -> None:
        operation = Operation("truncate", str(self.relative(file)), number=length)
        self.perform(operation, lambda: self.real["ftruncate"](file, length))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        relative = self.relative(path, dir_fd)
        if relative is None:
            self.real["mkdir"](path, mode, dir_fd=dir_fd)
        else:
            operation = Operation("mkdir", relative)
            self.perform(operation, lambda: self.real["mkdir"](path, mode, dir_fd=dir_fd))

    def rename(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        old = self.relative(src, src_dir_fd)
        new = self.relative(dst, dst_dir_fd)
        assert (old is None) == (new is None), (src, dst)
        real = self.real["rename"]
        if old is None:
            real(src, dst)
        else:
            self.perform(Operation("rename", old, new or ""), lambda: real(src, dst))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _remove(self, kind: str, path: Any, dir_fd: int | None) -> None:
        relative = self.relative(path, dir_fd)
        if relative is None:
            self.real[kind](path, dir_fd=dir_fd)
        else:
            self.perform(Operation(kind, relative), lambda: self.real[kind](path, dir_fd=dir_fd))

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        """Replace ``open``: a file that is written below the root gets its bytes traced."""
        if isinstance(file, int) or mode[0] not in _OPEN_FLAGS or self.relative(file) is None:
            return _REAL_OPEN(file, mode, buffering, *more, **named)
        flags = _OPEN_FLAGS[mode[0]] | os.O_WRONLY
        writer = io.BufferedWriter(_TracedFile(self, self.open(file, flags, 0o666)))
        return writer if "b" in mode else io.TextIOWrapper(writer, *more, **named)

    def install(self) -> None:
        for name in self.real:
            setattr(os, name, getattr(self, name))
        os.replace = self.rename
        os.remove = self.unlink
        io.open = self.open_file
        builtins.open = self.open_file
        sys.addaudithook(self.exit_if_untraced)

    def exit_if_untraced(self, event: str, details: tuple[Any, ...]) -> None:
        """End the process at a change that was not traced: the count would be wrong."""
        opens_for_writing = (
            event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if self.performing or not (event in _CHANGING_EVENTS or opens_for_writing):
            return
        if isinstance(details[0], str | bytes | os.PathLike) and self.relative(details[0]) is not None:
            os.write(2, f"not traced: {event} {details}\n".encode())
            os._exit(_UNTRACED_EXIT_CODE)


class _TracedFile(io.FileIO):
    def __init__(self, disk: TracedDisk, file: int) -> None:
        super().__init__(file, "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(self.fileno(), data)
