"""Outcomes of tests are kept as they come, and the rest can be run alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.outcome_table import outcome_table
from harness.outcomes import ROOT, Outcome, Outcomes, read_outcomes, source_hash

TESTS = """
import os
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("after the test")

def test_good():
    pass

def test_bad():
    assert os.environ.get("MENDED"), "a reason"

@pytest.mark.skip(reason="no such device")
def test_skipped():
    pass

def test_broken(broken):
    pass

def test_killed():
    if not os.environ.get("MENDED"):
        os._exit(9)
"""


def run(folder: Path, *arguments: str, mended: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the tests above as a command, with the plugin."""
    (folder / "test_samples.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "harness.outcomes", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(folder), "-rA", *arguments, "test_samples.py"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | ({"MENDED": "1"} if mended else {}),
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes_by_name(path: Path) -> dict[str, str]:
    return {test.split("::")[1]: each.outcome for test, each in read_outcomes(path).latest.items()}


@pytest.mark.extended
def test_a_killed_run_keeps_what_ended_and_the_rest_is_run_alone(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    first = run(tmp_path, "--outcomes", str(file))
    assert first.returncode == 9, first.stdout
    expected = {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_broken": "failed",
    }
    assert outcomes_by_name(file) == expected
    messages = {test.split("::")[1]: each.message for test, each in read_outcomes(file).latest.items()}
    assert "a reason" in messages["test_bad"]
    assert "no such device" in messages["test_skipped"]
    assert "after the test" in messages["test_broken"]
    table = outcome_table(read_outcomes(file), source_hash())
    assert "| `test_samples.py` | 1 | 2 | 1 | 1 |" in table
    assert "- `test_samples.py::test_broken`: RuntimeError: after the test\n" in table
    assert "## Skipped\n\n- no such device: 1\n" in table

    rest = run(tmp_path, "--outcomes", str(file), "--rest", mended=True)
    assert "1 deselected" in rest.stdout
    assert "PASSED test_samples.py::test_good" not in rest.stdout
    now = expected | {"test_bad": "passed", "test_killed": "passed"}
    assert outcomes_by_name(file) == now


@pytest.mark.extended
def test_workers_leave_the_record_to_the_process_that_leads_them(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    result = run(tmp_path, "--outcomes", str(file), "-n", "2")
    assert result.returncode == 1, result.stdout
    ended = [json.loads(line) for line in file.read_text().splitlines() if '"outcome"' in line]
    assert sorted(each["test"].split("::")[1] for each in ended) == [
        "test_bad",
        "test_broken",
        "test_good",
        "test_killed",
        "test_skipped",
    ]
    assert outcomes_by_name(file)["test_killed"] == "failed"
    assert len(read_outcomes(file).collected) == 5
    rest = run(tmp_path, "--outcomes", str(file), "--rest", "-n", "2", mended=True)
    assert "PASSED test_samples.py::test_good" not in rest.stdout
    assert "PASSED test_samples.py::test_killed" in rest.stdout


def test_the_rest_of_nothing_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "--rest")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--rest needs --outcomes FILE" in result.stderr


def test_an_outcome_with_other_source_counts_as_not_run() -> None:
    latest = {
        "a::x": Outcome("a::x", "passed", 2.0, "new"),
        "a::y": Outcome("a::y", "failed", 3.0, "old", "why"),
    }
    outcomes = Outcomes(("a::x", "a::y", "b::z"), latest, ("2026-11-17, a GPU",))
    assert outcomes.passed("new") == {"a::x"}
    table = outcome_table(outcomes, "new")
    assert "| `a` | 1 | 0 | 0 | 1 | 2 |" in table
    assert "| `b` | 0 | 0 | 0 | 1 | 0 |" in table
    assert "| all | 1 | 0 | 0 | 2 | 2 |" in table
    assert "other source: 1 failed" in table
    assert "why" not in table


def test_a_test_that_failed_last_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    for outcome in ("passed", "failed"):
        with file.open("a") as stream:
            stream.write(json.dumps(asdict(Outcome("a::x", outcome, 1.0, "s"))) + "\n")
    assert read_outcomes(file).passed("s") == set()


def test_an_incomplete_line_is_read_past_only_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    whole = json.dumps({"test": "a::x", "outcome": "passed", "seconds": 1.0, "source": "s"})
    file.write_text(f"{whole}\n{whole[:20]}")
    assert read_outcomes(file).passed("s") == {"a::x"}
    file.write_text(f"{whole[:20]}\n{whole}\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read_outcomes(file)


def test_the_hash_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = source_hash(tmp_path, ("*.py",))
    assert first == source_hash(tmp_path, ("*.py", "a.*"))
    (tmp_path / "a.py").write_text("2")
    second = source_hash(tmp_path, ("*.py",))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_hash(tmp_path, ("*.py",))}) == 3
