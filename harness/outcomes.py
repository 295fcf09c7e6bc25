"""A plugin of pytest that keeps the outcome of each test as it ends, and runs the rest alone.

    python -m pytest -p harness.outcomes --outcomes FILE tests/gpu -m gpu
    python -m pytest -p harness.outcomes --outcomes FILE --rest tests/gpu -m gpu
    python -m harness.outcome_table FILE

Tests on a GPU take longer than a GPU is free at times: a run that is ended loses nothing, and ``--rest``
leaves out the tests that passed with the same source. FILE has a line of JSON for each outcome, one for
the machine of each run, and one for the tests that were collected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan.inventory.hardware import inventory

ROOT = Path(__file__).resolve().parents[1]
# The source that tests on a GPU run: other tests and the documents cannot change their outcome.
_TREES = ("orchestrator", "experts", "harness", "benchmarks", "tests/gpu")
_SOURCES = tuple(f"{tree}/**/*.py" for tree in _TREES)
_VERSIONS = ("python", "torch", "cuda", "nccl", "ray")
_LONGEST_MESSAGE = 4000


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and with which source."""

    test: str
    outcome: str
    """passed, failed or skipped."""
    seconds: float
    source: str
    message: str = ""
    """The end of the error's text, or the reason of a skip."""


@dataclass(frozen=True)
class Outcomes:
    """The content of a file of outcomes."""

    collected: tuple[str, ...]
    """The tests of all runs, in the order of their first run."""
    latest: dict[str, Outcome]
    """The last outcome of each test."""
    machines: tuple[str, ...]
    """The dates, devices and versions of the runs, each once."""

    def passed(self, source: str) -> set[str]:
        """Return the tests whose last run passed with this source."""
        return {
            test
            for test, outcome in self.latest.items()
            if outcome.outcome == "passed" and outcome.source == source
        }


def read_outcomes(path: Path) -> Outcomes:
    """Read a file of outcomes. The last line may be incomplete: a process was killed while it wrote."""
    collected: dict[str, None] = {}
    latest: dict[str, Outcome] = {}
    machines: dict[str, None] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON; remove the line or the file") from None
        if "collected" in entry:
            collected.update(dict.fromkeys(entry["collected"]))
        elif "machine" in entry:
            machines.setdefault(entry["machine"])
        else:
            outcome = Outcome(**entry)
            collected.setdefault(outcome.test)
            latest[outcome.test] = outcome
    return Outcomes(tuple(collected), latest, tuple(machines))


def source_hash(root: Path = ROOT, patterns: Sequence[str] = _SOURCES) -> str:
    """Return a short hash of names and contents of the source files."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Recorder:
    """Writes outcomes. It runs in one process: where pytest-xdist has workers, in the one that leads them."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._collected: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        _complete_last_line(path)
        self._write({"machine": _machine()})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.collected(ids)

    def collected(self, tests: Iterable[str]) -> None:
        """Write the tests that no earlier call had."""
        new = [test for test in tests if test not in self._collected]
        self._collected.update(new)
        if new:
            self._write({"collected": new})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        # A crashed worker of pytest-xdist sends one report of no phase.
        if report.when in ("setup", "call"):
            return
        self._write(asdict(_outcome(report.nodeid, reports, self._source)))
        del self._reports[report.nodeid]

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _outcome(test: str, reports: Sequence[pytest.TestReport], source: str) -> Outcome:
    """Join the reports of a test's phases: its worst outcome, and the time of all."""
    seconds = round(sum(report.duration for report in reports), 2)
    for outcome in ("failed", "skipped"):
        for report in reports:
            if report.outcome == outcome:
                return Outcome(test, outcome, seconds, source, _message(report))
    return Outcome(test, "passed", seconds, source)


def _message(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text[-_LONGEST_MESSAGE:]


def _complete_last_line(path: Path) -> None:
    """Remove a last line that a killed process left without its end."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _machine() -> str:
    """Return the date, the device and the versions of a run."""
    hardware = inventory()
    device = hardware.gpus[0].name if hardware.gpus else hardware.cpu_name
    versions = [f"{name} {hardware.versions[name]}" for name in _VERSIONS if hardware.versions.get(name)]
    return ", ".join([str(date.today()), device, *versions])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes", "outcomes of tests, kept in a file")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="append the outcome of each test to FILE")
    group.addoption(
        "--rest",
        action="store_true",
        help="leave out the tests that passed in FILE with the same source",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = _path(config)
    if config.getoption("--rest") and path is None:
        raise pytest.UsageError("--rest needs --outcomes FILE, the outcomes of an earlier run")
    if path is not None and not _is_worker(config):
        config.pluginmanager.register(Recorder(path, _source()), "outcome recorder")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker of pytest-xdist the same tests: the file grows while they start."""
    node.workerinput["passed"] = sorted(_passed(node.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = _passed(config)
    rest = [item for item in items if item.nodeid not in passed]
    if len(rest) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = rest


def _passed(config: pytest.Config) -> set[str]:
    """Return the tests that ``--rest`` leaves out."""
    path = _path(config)
    if path is None or not config.getoption("--rest"):
        return set()
    if _is_worker(config):
        return set(config.workerinput["passed"])  # pyrefly: ignore[missing-attribute]
    return read_outcomes(path).passed(_source())


def _path(config: pytest.Config) -> Path | None:
    return config.getoption("--outcomes")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@cache
def _source() -> str:
    return source_hash()
