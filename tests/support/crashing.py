"""A process that dies at a given file-system operation, or finds the disk full there.

    crashes = Crashes(mortals, "tests.support.saves:by_the_saver", tmp_path, Path.mkdir)
    for crash in crashes.of(Fate("after", n) for n in crashes.points()):
        ...                                     # crash.folder: what is on disk; crash.told: what it had promised

A script is a function of a folder and of ``tell``, by which it says that a step is saved, or (None) that it could not be. It runs in a
child forked from a process that has torch loaded and no threads, so that hundreds of deaths take seconds. Below the folder every
operation that changes the disk is seen: those of Python by stand-ins for ``os`` and ``open``, with an audit hook that ends the child
should one slip by; those of safetensors, which writes from Rust, by doing in Python what it does there."""

from __future__ import annotations

import base64
import builtins
import errno
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROWS = {"mkdir", "open", "write", "truncate", "rename", "sync"}
"""What a full disk refuses. To remove is always allowed."""
_UNSEEN, _FAILED = 98, 99


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


@dataclass(frozen=True)
class Crash:
    """What a process left: its folder as it is now, and all that it had done."""

    fate: Fate
    folder: Path
    trace: tuple[Operation, ...]

    @property
    def told(self) -> list[int]:
        return [int(operation.path) for operation in self.trace if operation.kind == "told"]


class Mortals:
    """A process with torch loaded and no threads, whose children run scripts and die."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.crashing"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, script: str, fate: Fate, folder: Path, syncs: bool) -> Crash:
        """``folder/disk`` is the script's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"script": script, "fate": asdict(fate), "folder": str(folder), "syncs": syncs}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        killed = fate.kind in ("before", "after")
        assert answer in ("0", f"{-signal.SIGKILL}") if killed else answer == "0", f"{script}, {fate}: ended with {answer or 'nothing'}"
        return Crash(fate, folder / "disk", _read(folder / "trace"))

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Crashes:
    """The crashes of one script. ``prepare`` fills a folder before the script begins."""

    def __init__(self, mortals: Mortals, script: str, folder: Path, prepare: Callable[[Path], object], syncs: bool = False) -> None:
        self.mortals, self.script, self.folder, self.syncs = mortals, script, folder / "crash", syncs
        self.before = folder / "before"
        prepare(self.before)

    def undisturbed(self) -> Crash:
        (crash,) = self.of([Fate()])
        return crash

    def points(self) -> list[int]:
        return list(range(sum(operation.kind != "told" for operation in self.undisturbed().trace)))

    def of(self, fates: Iterable[Fate]) -> Iterator[Crash]:
        """Each in turn, in the same folder."""
        for fate in fates:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.before, self.folder / "disk")
            yield self.mortals.run(self.script, fate, self.folder, self.syncs)


def _read(path: Path) -> tuple[Operation, ...]:
    return tuple(Operation(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


# --- in the child


class Disk:
    """Stands between a process and what it changes below ``root``."""

    def __init__(self, root: Path, trace: int, fate: Fate, syncs: bool) -> None:
        self.root, self.trace, self.fate, self.syncs = str(root), trace, fate, syncs
        self.count, self.full, self.inside = 0, False, False
        self.real = {name: getattr(os, name) for name in ("open", "write", "fsync", "ftruncate", "mkdir", "rename", "unlink", "rmdir")}

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path relative to the root; None for one elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None and dir_fd >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        full = os.path.abspath(os.fsdecode(path))
        return os.path.relpath(full, self.root) if full == self.root or full.startswith(self.root + os.sep) else None

    def record(self, operation: Operation) -> None:
        self.real["write"](self.trace, (json.dumps(asdict(operation)) + "\n").encode())

    def do(self, operation: Operation, act: Callable[[], Any]) -> Any:
        number, self.count = self.count, self.count + 1
        if number == self.fate.at and self.fate.kind == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.full = self.full or (number == self.fate.at and self.fate.kind == "full")
        if (self.full and operation.kind in GROWS) or (number == self.fate.at and self.fate.kind == "full once"):
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
        return self.do(Operation("open", where, at=flags), lambda: self.real["open"](path, flags, mode, dir_fd=dir_fd))

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
        self.do(Operation("truncate", str(self.below(file)), at=length), lambda: self.real["ftruncate"](file, length))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        where = self.below(path, dir_fd)
        if where is None:
            self.real["mkdir"](path, mode, dir_fd=dir_fd)
        else:
            self.do(Operation("mkdir", where), lambda: self.real["mkdir"](path, mode, dir_fd=dir_fd))

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        old, new = self.below(source, src_dir_fd), self.below(target, dst_dir_fd)
        assert (old is None) == (new is None), (source, target)
        real = self.real["rename"]
        self.do(Operation("rename", old, new or ""), lambda: real(source, target)) if old is not None else real(source, target)

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
        kind = {"w": os.O_TRUNC | os.O_CREAT, "x": os.O_EXCL | os.O_CREAT, "a": os.O_APPEND | os.O_CREAT}[mode[0]]
        raw = _Raw(self, self.open(file, kind | os.O_WRONLY, 0o666))
        return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), *more, **named)

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
        importlib.import_module("orchestrator.train.checkpoint").save_file = self.save_tensors  # pyright: ignore[reportAttributeAccessIssue]
        sys.addaudithook(self.notice)

    def notice(self, event: str, details: tuple[Any, ...]) -> None:
        """End the process where a change was not seen: the count would be wrong, and a test with it."""
        changes = event in _CHANGES or (event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and not self.inside and isinstance(details[0], str | bytes | os.PathLike) and self.below(details[0]) is not None:
            os.write(2, f"not seen: {event} {details}\n".encode())
            os._exit(_UNSEEN)


_REAL_OPEN = builtins.open
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}


class _Raw(io.FileIO):
    def __init__(self, disk: Disk, file: int) -> None:
        super().__init__(file, "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(self.fileno(), data)


def _child(asked: Mapping[str, Any]) -> None:
    folder = Path(asked["folder"])
    trace = os.open(folder / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    disk = Disk(folder / "disk", trace, Fate(**asked["fate"]), asked["syncs"])
    script = _script(asked["script"])

    def tell(step: int | None) -> None:
        if step is not None:
            disk.record(Operation("told", str(step)))
        disk.full = False

    disk.install()
    script(folder / "disk", tell)


@cache
def _script(name: str) -> Callable[..., None]:
    """By its name, and run once: what it imports late is there for every child."""
    module, _, function = name.partition(":")
    script = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory() as folder:
        script(Path(folder), lambda _: None)
    return script


def _serve() -> None:
    """Fork a child for each line, one after the other, and answer with how it ended."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        _script(asked["script"])
        child = os.fork()
        if child == 0:
            code = _FAILED
            try:
                _child(asked)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
