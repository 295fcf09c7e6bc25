"""Mutation testing: change the source in one place, run the tests of that module, and list the
changes they miss.

    make mutants ARGS='--count 100 --seed 0 experts/moe/gate.py'
    python -m tests.mutation.run --list orchestrator/plan/cost/*.py

Each mutant is written into a temporary copy of the repository, one copy per job. A child process
forked from this one, with torch and pytest loaded already, runs ``pytest -x`` there, the fastest
tests first. A mutant is killed when a test fails or takes too long; it survives when all tests pass.
Survivors are printed with their file, line and diff.

With ``--planted`` the faults of ``planted.yaml`` are run in place of mutants, with the tests named there.
With ``--tier test`` only tests of ``make test`` run, so that the scores of the two tiers can be compared.

A mutant that no test can kill on a CPU (the program behaves the same, or needs a GPU) is listed in
``equivalent.yaml``. It is not run, and not counted in the score: killed / (killed + survived).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutation.mutate import Mutant, mutants
from tests.mutation.sandbox import (
    LOG,
    TIERS,
    TestRun,
    copy_repository,
    end_session,
    fork_tests,
    preload,
    read_durations,
    slowest,
    write_module,
)
from tests.mutation.targets import TARGETS, mirrored_tests, target_files

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
PLANTED = Path(__file__).with_name("planted.yaml")
POLL_S = 0.02
NO_TESTS = 5  # pytest's exit code
# Limits as multiples of the unchanged run, and the least of them: a mutant may slow the tests down,
# and other processes do so too.
TEST_FACTOR = 6
LEAST_TEST_S = 10.0
RUN_FACTOR = 4
LEAST_RUN_S = 20.0


@dataclass(frozen=True)
class Chosen:
    """A mutant to run, and the test files that are to notice it."""

    target: str
    mutant: Mutant
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A mutant of a module, with the tests that are run against it."""

    target: str
    original: str
    mutant: Mutant
    tests: TestRun
    limit_s: float


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

    def start(self, job: Job) -> None:
        """Write the mutant and fork its tests."""
        write_module(self.folder, job.target, job.mutant.source)
        self.job = job
        self.pid = fork_tests(self.folder, job.tests)
        self.deadline = time.monotonic() + job.limit_s

    def poll(self) -> Outcome | None:
        """Return the outcome once the tests have ended or run out of time."""
        assert self.job is not None
        assert self.pid is not None
        pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
        has_ended = pid != 0
        if not has_ended and time.monotonic() < self.deadline:
            return None
        end_session(self.pid)
        if not has_ended:
            os.waitpid(self.pid, 0)
        outcome = Outcome(self.job, _status(has_ended, wait_status))
        write_module(self.folder, self.job.target, self.job.original)
        self.job = None
        self.pid = None
        return outcome


def _status(has_ended: bool, wait_status: int) -> str:
    if not has_ended:
        return "timeout"
    # Files without a test of the tier notice nothing.
    return "survived" if os.waitstatus_to_exitcode(wait_status) in (0, NO_TESTS) else "killed"


def run_baseline(folder: Path, target: str, tests: Sequence[str], tier: str) -> float:
    """Run the tests of an unchanged module. Returns their seconds; raises where they do not pass."""
    begun = time.monotonic()
    pid = fork_tests(folder, TestRun(tuple(tests), tier, is_baseline=True))
    _, wait_status = os.waitpid(pid, 0)
    end_session(pid)
    code = os.waitstatus_to_exitcode(wait_status)
    if code == NO_TESTS and tier == "all":
        raise SystemExit(f"{target}: {', '.join(tests)} hold no test that runs without Ray or a GPU")
    if code not in (0, NO_TESTS):
        output = (folder / LOG).read_text(errors="replace")
        raise SystemExit(f"{target}: its tests fail without any change\n{output}")
    return time.monotonic() - begun


def plan_jobs(chosen: Sequence[Chosen], folder: Path, tier: str) -> Iterator[Job]:
    """Measure the tests of mutants once, and derive their limits."""
    measured: dict[tuple[str, ...], tuple[TestRun, float]] = {}
    for each in chosen:
        if not each.tests:
            raise SystemExit(f"{each.target} has no tests: name them in tests/mutation/targets.py")
        if each.tests not in measured:
            measured[each.tests] = _measure(each.target, each.tests, folder, tier)
        tests, limit_s = measured[each.tests]
        yield Job(each.target, read_module(each.target), each.mutant, tests, limit_s)


def _measure(target: str, tests: Sequence[str], folder: Path, tier: str) -> tuple[TestRun, float]:
    seconds = run_baseline(folder, target, tests, tier)
    say(f"{target}: tests pass unchanged in {seconds:.1f} s ({', '.join(tests)})")
    test_limit_s = max(LEAST_TEST_S, TEST_FACTOR * slowest(read_durations(folder), tests))
    return TestRun(tuple(tests), tier, test_limit_s), max(LEAST_RUN_S, RUN_FACTOR * seconds)


def run_all(jobs: Sequence[Job], slots: Sequence[Slot]) -> Iterator[Outcome]:
    """Yield the outcomes as they come, with a job in every slot."""
    waiting = list(reversed(jobs))
    try:
        while waiting or any(slot.job is not None for slot in slots):
            for slot in slots:
                if slot.job is not None:
                    outcome = slot.poll()
                    if outcome is not None:
                        yield outcome
                if slot.job is None and waiting:
                    slot.start(waiting.pop())
            time.sleep(POLL_S)
    finally:
        for slot in slots:
            if slot.pid is not None:
                end_session(slot.pid)


def make_slots(first: Path, number: int) -> list[Slot]:
    """Copy the copy of the baselines, bytecode and durations included."""
    slots = [Slot(first)]
    for index in range(1, number):
        folder = first.with_name(str(index))
        shutil.copytree(first, folder)
        slots.append(Slot(folder))
    return slots


def read_equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Return the reasons of mutants that cannot be killed, by file, removed and added text."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return {(entry["file"], entry["removed"], entry["added"]): entry["reason"] for entry in entries}


def choose_mutants(targets: Sequence[str]) -> list[Chosen]:
    """Return all mutants that are not listed as equivalent."""
    equivalents = read_equivalents()
    return [
        Chosen(target, mutant, tuple(mirrored_tests(ROOT, target)))
        for target in targets
        for mutant in mutants_of(target)
        if (target, mutant.removed, mutant.added) not in equivalents
    ]


def read_planted(path: Path = PLANTED) -> list[Chosen]:
    """Return the faults that are planted by hand, each in the first place that has its text."""
    planted: list[Chosen] = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        source = read_module(entry["file"])
        removed, added = entry["removed"], entry["added"]
        if removed not in source:
            raise SystemExit(f"{path.name}: {entry['file']} has no text {removed!r}; correct the entry")
        line = source[: source.index(removed)].count("\n") + 1
        mutant = Mutant("planted", line, source.replace(removed, added, 1), removed, added)
        planted.append(Chosen(entry["file"], mutant, tuple(entry["tests"])))
    return planted


def sample(candidates: Sequence[Chosen], count: int | None, seed: int) -> list[Chosen]:
    if count is None or count >= len(candidates):
        return list(candidates)
    picked = sorted(random.Random(seed).sample(range(len(candidates)), count))
    return [candidates[index] for index in picked]


def mutants_of(target: str) -> list[Mutant]:
    return mutants(read_module(target))


def read_module(target: str) -> str:
    return (ROOT / target).read_text(encoding="utf-8")


def report(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the survivors with their diffs, a line per module, and the score."""
    lines = []
    for outcome in outcomes:
        job = outcome.job
        if outcome.status == "survived":
            lines.append(f"\nsurvived: {job.target}:{job.mutant.line} ({job.mutant.kind})")
            lines.append(job.mutant.diff(job.original, job.target))
    lines += ["", *_lines_per_module(outcomes)]
    num_killed = sum(outcome.status != "survived" for outcome in outcomes)
    share = killed_share(outcomes)
    lines.append(f"{num_killed} of {len(outcomes)} mutants killed ({share:.0%}) in {seconds:.0f} s")
    return "\n".join(lines)


def killed_share(outcomes: Sequence[Outcome]) -> float:
    """Return the score: the share of mutants that did not survive."""
    num_killed = sum(outcome.status != "survived" for outcome in outcomes)
    return num_killed / max(1, len(outcomes))


def _lines_per_module(outcomes: Sequence[Outcome]) -> list[str]:
    by_target: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_target.setdefault(outcome.job.target, []).append(outcome.status)
    lines = []
    for target, statuses in sorted(by_target.items()):
        num_killed = len(statuses) - statuses.count("survived")
        lines.append(f"{target}: {num_killed} of {len(statuses)} killed")
    return lines


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description="Mutation testing.")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="modules, or patterns of them")
    parser.add_argument("--count", type=int, help="run a sample of so many mutants; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time")
    parser.add_argument("--no-preload", action="store_true", help="for modules whose tests need no torch")
    parser.add_argument("--planted", action="store_true", help="the faults of planted.yaml, not mutants")
    parser.add_argument(
        "--tier", choices=list(TIERS), default="all", help="tests of make test alone, or of make test-all"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--fail-under", type=float, default=0.0, metavar="PERCENT", help="exit 1 below this score"
    )
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    targets = target_files(ROOT, options.targets)
    if not targets:
        raise SystemExit(
            f"no module matches {' '.join(options.targets)}; give paths such as experts/moe/gate.py"
        )
    candidates = read_planted() if options.planted else choose_mutants(targets)
    chosen = sample(candidates, options.count, options.seed)
    if options.list:
        for each in chosen:
            mutant = each.mutant
            say(f"{each.target}:{mutant.line} {mutant.kind}: {mutant.removed} => {mutant.added}")
        return 0
    if not options.no_preload:
        preload()
    begun = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as parent:
        first = Path(parent) / "0"
        copy_repository(ROOT, first)
        jobs = list(plan_jobs(chosen, first, options.tier))
        for outcome in run_all(jobs, make_slots(first, options.jobs)):
            outcomes.append(outcome)
            where = f"{outcome.job.target}:{outcome.job.mutant.line}"
            say(f"{len(outcomes)}/{len(jobs)} {outcome.status} {where}")
    say(report(outcomes, time.monotonic() - begun))
    return int(100 * killed_share(outcomes) < options.fail_under)


if __name__ == "__main__":
    sys.exit(main())
