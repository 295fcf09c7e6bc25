"""A process that dies at a given file-system operation, or finds the disk full there.

    crashes = Crashes(mortals, "tests.support.save_scripts:by_the_saver", tmp_path, Path.mkdir)
    for crash in crashes.of(Fate("after", n) for n in crashes.points()):
        ...                                     # crash.folder: what is on disk; crash.told: what it had promised

A script is a function of a folder and of ``tell``, by which it says that a step is saved, or (None) that it could not be. It runs in a
child forked from a process that has torch loaded and no threads, so that hundreds of deaths take seconds."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.traced_disk import Disk, Fate, Operation

ROOT = Path(__file__).resolve().parents[2]
_FAILED = 99


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
        command = [sys.executable, "-m", "tests.support.crash_injection"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: str, fate: Fate, folder: Path, syncs: bool) -> Crash:
        """``folder/disk`` is the script's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"script": script, "fate": asdict(fate), "folder": str(folder), "syncs": syncs}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        killed = fate.kind in ("before", "after")
        assert answer in ("0", f"{-signal.SIGKILL}") if killed else answer == "0", (
            f"{script}, {fate}: ended with {answer or 'nothing'}"
        )
        return Crash(fate, folder / "disk", _read(folder / "trace"))

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Crashes:
    """The crashes of one script. ``prepare`` fills a folder before the script begins."""

    def __init__(
        self,
        mortals: Mortals,
        script: str,
        folder: Path,
        prepare: Callable[[Path], object],
        syncs: bool = False,
    ) -> None:
        self.mortals, self.script, self.folder, self.syncs = mortals, script, folder / "crash", syncs
        self.before = folder / "before"
        prepare(self.before)

    def undisturbed(self) -> Crash:
        (crash,) = self.of([Fate()])
        return crash

    def points(self, after: int = 0) -> list[int]:
        """The operations of the script by number; those ``after`` so many words of it."""
        told, words = [], 0
        for operation in self.undisturbed().trace:
            words += operation.kind == "told"
            told += [words] if operation.kind != "told" else []
        return [number for number, heard in enumerate(told) if heard >= after]

    def of(self, fates: Iterable[Fate]) -> Iterator[Crash]:
        """Each in turn, in the same folder."""
        for fate in fates:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.before, self.folder / "disk")
            yield self.mortals.run(self.script, fate, self.folder, self.syncs)


def _read(path: Path) -> tuple[Operation, ...]:
    return tuple(Operation(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


# --- in the child


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
                traceback.print_exc()
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
