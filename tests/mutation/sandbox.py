"""Runs tests in a temporary copy of the repository, in a process forked with torch and pytest loaded.

A copy holds bytecode of its own, so that only the mutated module is compiled anew for a mutant.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COPIED = ("orchestrator", "experts", "harness", "benchmarks", "tests", "docs", "README.md", "pyproject.toml")
OWN_PACKAGES = ("orchestrator", "experts", "harness", "benchmarks", "tests")
# Loaded once, before the forks. Nothing of the repository itself: a mutant replaces it.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch.testing",
    "numpy",
    "yaml",
    "rich.console",
    "safetensors.torch",
    "psutil",
    "pytest",
    "hypothesis",
    "_pytest.assertion.rewrite",
)
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
TIERS = {
    "all": "not slow and not gpu and not ray",
    "test": "not slow and not gpu and not ray and not extended",
}
"""The tests of ``make test-all`` and of ``make test``, as far as they need neither Ray nor a GPU."""
DURATIONS = "durations.json"
LOG = "mutation.log"


@dataclass(frozen=True)
class TestRun:
    """Test files to run in a copy, with a time limit for each test."""

    __test__ = False  # pytest would collect it

    tests: tuple[str, ...]
    tier: str = "all"
    """A name of ``TIERS``."""
    test_limit_s: float | None = None
    is_baseline: bool = False
    """Record the durations of the tests, and write bytecode. Other runs begin with the fastest tests."""


def preload() -> None:
    """Import what every test process needs. One thread: a fork copies no others."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOAD:
        importlib.import_module(name)


def copy_repository(root: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        elif source.exists():
            shutil.copy2(source, folder / name)


def write_module(folder: Path, target: str, source: str) -> None:
    """Write a module of a copy, and remove its bytecode.

    Python compares source and bytecode by size and by the time in seconds: too coarse for two mutants
    in a row.
    """
    path = folder / target
    path.write_text(source, encoding="utf-8")
    for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        bytecode.unlink()


def fork_tests(folder: Path, run: TestRun) -> int:  # pyrefly: ignore[bad-return]
    """Start tests in a copy, in a child that leads a session of its own. Returns its process id."""
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        os.setsid()
        _redirect_output(folder / LOG)
        _enter(folder, run.is_baseline)
        import pytest

        limit = [f"--timeout={run.test_limit_s:g}"] if run.test_limit_s else []
        plugin = _Durations(folder / DURATIONS, run.is_baseline)
        code = int(pytest.main([*PYTEST, *limit, "-m", TIERS[run.tier], *run.tests], plugins=[plugin]))
    finally:
        # without the exit handlers of the parent, which would remove its temporary folders
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _enter(folder: Path, write_bytecode: bool) -> None:
    """Make this process, and the Python processes it starts, import from the copy."""
    for name in list(sys.modules):
        if name.split(".")[0] in OWN_PACKAGES:
            del sys.modules[name]
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = not write_bytecode
    os.environ["PYTHONPATH"] = str(folder)
    if not write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def end_session(leader: int) -> None:
    """Kill what is left of a test process and of the processes in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def read_durations(folder: Path) -> dict[str, float]:
    """Return the seconds of every test that a baseline has run in this copy."""
    path = folder / DURATIONS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class _Durations:
    """A pytest plugin: records the duration of each test, or runs the fastest tests first."""

    def __init__(self, path: Path, is_baseline: bool) -> None:
        self._path = path
        self._is_baseline = is_baseline
        self._seconds = read_durations(path.parent)

    def pytest_collection_finish(self, session: Any) -> None:
        # after the repository's own order; a sort keeps tests of the same duration in theirs
        if not self._is_baseline:
            session.items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self._is_baseline:
            self._path.write_text(json.dumps(self._seconds), encoding="utf-8")


def slowest(durations: dict[str, float], tests: Sequence[str]) -> float:
    """Return the seconds of the slowest test of these files."""
    seconds = [value for name, value in durations.items() if name.split("::")[0] in tests]
    return max(seconds, default=0.0)
