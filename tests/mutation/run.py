"""Mutation testing: change the source in one place, run the tests of that module, and list the
changes they miss.

    make mutants ARGS='--count 100 --seed 0 experts/gate.py'
    python -m tests.mutation.run --list orchestrator/plan/cost/*.py

Each mutant is written into a temporary copy of the repository, one copy per job. A child process
forked from this one, with torch and pytest loaded already, runs ``pytest -x`` there. A mutant is
killed when a test fails or when the tests take too long; it survives when they all pass. Survivors
are printed with their file, line and diff.

A mutant that no test can kill on a CPU (the program behaves the same, or needs a GPU) is listed in
``equivalent.yaml``. It is not run, and not counted in the score: killed / (killed + survived).
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutation.mutate import Mutant, mutants
from tests.mutation.targets import TARGETS, mirrored_tests, target_files

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
COPIED = ("orchestrator", "experts", "benchmarks", "tests", "docs", "README.md", "pyproject.toml")
OWN_PACKAGES = ("orchestrator", "experts", "benchmarks", "tests")
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
MARKERS = "not slow and not gpu and not ray"
POLL_S = 0.02
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Job:
    """A mutant of a module, with the tests that are run against it."""

    target: str
    mutant: Mutant
    tests: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    status: str
    """killed, timeout or survived."""


@dataclass
class Slot:
    """A copy of the repository and the test process that runs in it, if any."""

    folder: Path
    pid: int | None = None
    job: Job | None = None
    deadline: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "mutation.log"

    def start(self, job: Job) -> None:
        """Write the mutant and fork its tests."""
        self._write(job.target, job.mutant.source)
        self.job = job
        self.pid = fork_tests(self.folder, job.tests, self.log)
        self.deadline = time.monotonic() + job.timeout_s

    def poll(self) -> Outcome | None:
        """Return the outcome once the tests have ended or run out of time."""
        assert self.job is not None
        assert self.pid is not None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() < self.deadline:
            return None
        end_session(self.pid)
        if pid == 0:
            os.waitpid(self.pid, 0)
        return self._finish(_status(pid != 0, status))

    def _finish(self, status: str) -> Outcome:
        assert self.job is not None
        outcome = Outcome(self.job, status)
        original = (ROOT / self.job.target).read_text(encoding="utf-8")
        self._write(self.job.target, original)
        self.job = None
        self.pid = None
        return outcome

    def _write(self, target: str, source: str) -> None:
        path = self.folder / target
        path.write_text(source, encoding="utf-8")
        # Python compares source and bytecode by size and by the time in seconds: too coarse for two
        # mutants in a row
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()


def _status(ended: bool, wait_status: int) -> str:
    if not ended:
        return "timeout"
    code = os.waitstatus_to_exitcode(wait_status)
    return "survived" if code == 0 else "killed"


def fork_tests(folder: Path, tests: Sequence[str], log: Path, write_bytecode: bool = False) -> int:
    """Run test files in a copy of the repository, in a child that leads a session of its own.

    Returns its pid.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        os.setsid()
        _redirect_output(log)
        _enter(folder, write_bytecode)
        import pytest

        code = int(pytest.main([*PYTEST, "-m", MARKERS, *tests]))
    finally:
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


@contextmanager
def slots(number: int) -> Iterator[list[Slot]]:
    """Copies of the repository, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as parent:
        created = []
        for index in range(number):
            folder = Path(parent) / str(index)
            copy_repository(folder)
            created.append(Slot(folder))
        try:
            yield created
        finally:
            for slot in created:
                if slot.pid is not None:
                    end_session(slot.pid)


def copy_repository(folder: Path) -> None:
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        elif source.exists():
            shutil.copy(source, folder / name)


def baseline(slot: Slot, target: str, tests: Sequence[str]) -> float:
    """Run the tests of a module unchanged.

    Returns the seconds they take; raises where they do not pass.
    """
    begun = time.monotonic()
    pid = fork_tests(slot.folder, tests, slot.log, write_bytecode=True)
    _, status = os.waitpid(pid, 0)
    end_session(pid)
    code = os.waitstatus_to_exitcode(status)
    if code == NO_TESTS:
        raise SystemExit(f"{target}: {', '.join(tests)} hold no test that runs without Ray or a GPU")
    if code != 0:
        raise SystemExit(
            f"{target}: its tests fail without any change\n{slot.log.read_text(errors='replace')}"
        )
    return time.monotonic() - begun


def run_all(jobs: Sequence[Job], workers: Sequence[Slot]) -> Iterator[Outcome]:
    """Yield the outcomes as they come, with a job in every slot."""
    waiting = list(reversed(jobs))
    while waiting or any(slot.job is not None for slot in workers):
        for slot in workers:
            if slot.job is not None:
                outcome = slot.poll()
                if outcome is not None:
                    yield outcome
            if slot.job is None and waiting:
                slot.start(waiting.pop())
        time.sleep(POLL_S)


def read_equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Return the reasons of mutants that change nothing, by file, removed and added text."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return {(entry["file"], entry["removed"], entry["added"]): entry["reason"] for entry in entries}


def chosen_mutants(targets: Sequence[str], count: int | None, seed: int) -> list[tuple[str, Mutant]]:
    """Return the mutants to run: all that are not known as equivalent, or a sample of them."""
    equivalents = read_equivalents()
    every = [(target, mutant) for target in targets for mutant in mutants_of(target)]
    candidates = [
        (target, mutant)
        for target, mutant in every
        if (target, mutant.removed, mutant.added) not in equivalents
    ]
    if count is None or count >= len(candidates):
        return candidates
    picked = sorted(random.Random(seed).sample(range(len(candidates)), count))
    return [candidates[index] for index in picked]


def mutants_of(target: str) -> list[Mutant]:
    return mutants((ROOT / target).read_text(encoding="utf-8"))


def plan_jobs(chosen: Sequence[tuple[str, Mutant]], slot: Slot, time_limit_s: float | None) -> Iterator[Job]:
    """Measure the tests of each module once, and give each of its mutants several times as long."""
    timeouts: dict[str, float] = {}
    for target, mutant in chosen:
        tests = mirrored_tests(ROOT, target)
        if not tests:
            raise SystemExit(f"{target} has no tests: name them in tests/mutation/targets.py")
        if target not in timeouts:
            seconds = baseline(slot, target, tests)
            timeouts[target] = time_limit_s or 10 + 4 * seconds
            say(f"{target}: tests pass unchanged in {seconds:.1f} s ({', '.join(tests)})")
        yield Job(target, mutant, tuple(tests), timeouts[target])


def report(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the survivors with their diffs, a line per module, and the score."""
    lines = []
    for outcome in outcomes:
        if outcome.status == "survived":
            job = outcome.job
            original = (ROOT / job.target).read_text(encoding="utf-8")
            lines += [f"\nsurvived: {job.target}:{job.mutant.line} ({job.mutant.kind})"]
            lines += [job.mutant.diff(original, job.target)]
    lines += ["", *_lines_per_module(outcomes)]
    survived = sum(outcome.status == "survived" for outcome in outcomes)
    killed = len(outcomes) - survived
    lines += [f"{killed} of {len(outcomes)} mutants killed ({killed_share(outcomes):.0%}) in {seconds:.0f} s"]
    return "\n".join(lines)


def killed_share(outcomes: Sequence[Outcome]) -> float:
    """Return the score: the share of mutants that did not survive."""
    killed = sum(outcome.status != "survived" for outcome in outcomes)
    return killed / max(1, len(outcomes))


def _lines_per_module(outcomes: Sequence[Outcome]) -> list[str]:
    by_target: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_target.setdefault(outcome.job.target, []).append(outcome.status)
    return [_module_line(target, statuses) for target, statuses in sorted(by_target.items())]


def _module_line(target: str, statuses: Sequence[str]) -> str:
    survived = statuses.count("survived")
    late = statuses.count("timeout")
    killed = len(statuses) - survived
    return f"{target}: {killed} of {len(statuses)} killed ({late} by the time limit)"


def preload() -> None:
    """Import what every test process needs. One thread: a fork copies no others."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOAD:
        importlib.import_module(name)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description="Mutation testing.")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="modules, or patterns of them")
    parser.add_argument("--count", type=int, help="run a sample of so many mutants; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time")
    parser.add_argument("--time-limit", type=float, metavar="S", help="default: 10 s and 4 times the tests")
    parser.add_argument("--no-preload", action="store_true", help="for modules whose tests need no torch")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--fail-under", type=float, default=0.0, metavar="PERCENT", help="exit 1 below this score"
    )
    return parser.parse_args(arguments)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    options = parse()
    targets = target_files(ROOT, options.targets)
    if not targets:
        raise SystemExit(f"no module matches {' '.join(options.targets)}; give paths such as experts/gate.py")
    chosen = chosen_mutants(targets, options.count, options.seed)
    if options.list:
        for target, mutant in chosen:
            say(f"{target}:{mutant.line} {mutant.kind}: {mutant.removed} => {mutant.added}")
        return 0
    if not options.no_preload:
        preload()
    begun = time.monotonic()
    outcomes = []
    with slots(options.jobs) as workers:
        jobs = list(plan_jobs(chosen, workers[0], options.time_limit))
        for outcome in run_all(jobs, workers):
            outcomes.append(outcome)
            where = f"{outcome.job.target}:{outcome.job.mutant.line}"
            say(f"{len(outcomes)}/{len(jobs)} {outcome.status} {where}")
    say(report(outcomes, time.monotonic() - begun))
    return int(100 * killed_share(outcomes) < options.fail_under)


if __name__ == "__main__":
    sys.exit(main())
