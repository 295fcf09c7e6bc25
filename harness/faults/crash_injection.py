"""Runs a script in a process that dies, or finds the disk full, at a chosen operation.

    series = CrashSeries(runner, "harness.storage.save_scripts:save_with_writer", tmp_path, Path.mkdir)
    for crash in series.run(DiskFault("after", number) for number in series.operations()):
        ...  # crash.folder: what is on disk; crash.acknowledged: the steps that the script said are safe

A script is a function of a folder and of ``acknowledge``, by which it says that a step is saved,
or (None) that it could not be. It runs in a child forked from a process that has torch loaded
and no threads, so that hundreds of crashes take seconds."""

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

from harness.storage.traced_disk import DiskFault, Operation, TracedDisk

ROOT = Path(__file__).resolve().parents[2]
_SCRIPT_FAILED = 99


@dataclass(frozen=True)
class Crash:
    """The folder that a process left, and all operations that it had done."""

    fault: DiskFault
    folder: Path
    trace: tuple[Operation, ...]

    @property
    def acknowledged(self) -> list[int]:
        """The steps that the script said are safe."""
        return [int(operation.path) for operation in self.trace if operation.kind == "acknowledged"]


class CrashRunner:
    """A process with torch loaded and no threads, whose children run scripts and die."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "harness.faults.crash_injection"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: str, fault: DiskFault, folder: Path, syncs: bool) -> Crash:
        """Run a script in ``folder/disk``. With ``syncs`` its files are really synced."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "script": script,
            "fault": asdict(fault),
            "folder": str(folder),
            "syncs": syncs,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        exit_code = self._process.stdout.readline().strip()
        expected = ["0", f"{-signal.SIGKILL}"] if fault.kind in ("before", "after") else ["0"]
        assert exit_code in expected, f"{script}, {fault}: ended with {exit_code or 'nothing'}"
        return Crash(fault, folder / "disk", _read_trace(folder / "trace"))

    def close(self) -> None:
        self._process.communicate(timeout=60)


class CrashSeries:
    """The crashes of one script. ``prepare`` fills its folder before it begins."""

    def __init__(
        self,
        runner: CrashRunner,
        script: str,
        folder: Path,
        prepare: Callable[[Path], object],
        syncs: bool = False,
    ) -> None:
        self.runner = runner
        self.script = script
        self.folder = folder / "crash"
        self.syncs = syncs
        self.initial_folder = folder / "before"
        prepare(self.initial_folder)

    def run_undisturbed(self) -> Crash:
        (crash,) = self.run([DiskFault()])
        return crash

    def operations(self, after: int = 0) -> list[int]:
        """Return the numbers of the operations that come after so many acknowledgements."""
        num_acknowledged = 0
        acknowledged_before: list[int] = []
        for operation in self.run_undisturbed().trace:
            if operation.kind == "acknowledged":
                num_acknowledged += 1
            else:
                acknowledged_before.append(num_acknowledged)
        return [number for number, count in enumerate(acknowledged_before) if count >= after]

    def run(self, faults: Iterable[DiskFault]) -> Iterator[Crash]:
        """Run the script with each fault, always in the same folder."""
        for fault in faults:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.initial_folder, self.folder / "disk")
            yield self.runner.run(self.script, fault, self.folder, self.syncs)


def _read_trace(path: Path) -> tuple[Operation, ...]:
    return tuple(Operation(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


# In the child process


def _run_child(request: Mapping[str, Any]) -> None:
    folder = Path(request["folder"])
    trace = os.open(folder / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    disk = TracedDisk(folder / "disk", trace, DiskFault(**request["fault"]), request["syncs"])
    script = _load_script(request["script"])

    def acknowledge(step: int | None) -> None:
        if step is not None:
            disk.record(Operation("acknowledged", str(step)))
        disk.full = False

    disk.install()
    script(folder / "disk", acknowledge)


@cache
def _load_script(name: str) -> Callable[..., None]:
    """Return a script by name. It is run once, so that every child finds its late imports done."""
    module, _, function = name.partition(":")
    script = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory() as folder:
        script(Path(folder), lambda _: None)
    return script


def _serve() -> None:
    """Fork a child for each line of input, one after the other, and print its exit code."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        _load_script(request["script"])
        child = os.fork()
        if child == 0:
            code = _SCRIPT_FAILED
            try:
                _run_child(request)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
