"""The whole tool on a repository of one small module, a copy of the tool included."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.run import ROOT, read_planted
from tests.mutation.sandbox import COPIED

MODULE = '''"""A module."""


def clip(value: int, top: int = 10) -> int:
    """Limit a value."""
    return top if value > top else value


def wait(done: bool) -> bool:
    """Run until done."""
    while not done:
        pass
    return done
'''
TESTS = """from experts.clip import clip, wait


def test_clip() -> None:
    assert clip(11) == 10
    assert clip(3) == 3


def test_wait() -> None:
    assert wait(True)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "experts").mkdir()
    (tmp_path / "tests/experts").mkdir(parents=True)
    for package in ("experts", "tests", "tests/experts"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "experts/clip.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "tests/experts/test_clip.py").write_text(TESTS, encoding="utf-8")
    shutil.copytree(Path(__file__).parent, tmp_path / "tests/mutation")
    (tmp_path / "tests/mutation/equivalent.yaml").write_text("", encoding="utf-8")
    shorten_limit(tmp_path / "tests/mutation/run.py")
    return tmp_path


def shorten_limit(tool: Path) -> None:
    """Give up on an endless loop after two seconds; a plain run allows ten."""
    source = tool.read_text(encoding="utf-8")
    assert "LEAST_TEST_S = 10.0" in source
    tool.write_text(source.replace("LEAST_TEST_S = 10.0", "LEAST_TEST_S = 2.0"), encoding="utf-8")


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutation.run", "--no-preload", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)


@pytest.mark.extended
def test_survivors_are_listed_and_the_source_stays_as_it_was(repository: Path) -> None:
    """The tests do not reach the boundary: ``>=`` survives.

    The endless loop is ended by the limit of a test.
    """
    done = run(repository, "--jobs", "2", "--fail-under", "90", "experts/*.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "survived: experts/clip.py:6 (comparison)" in done.stdout
    assert "+    return top if value >= top else value" in done.stdout
    assert "experts/clip.py: 3 of 4 killed" in done.stdout
    assert (repository / "experts/clip.py").read_text(encoding="utf-8") == MODULE


def test_equivalent_mutants_are_not_run(repository: Path) -> None:
    (repository / "tests/mutation/equivalent.yaml").write_text(
        "- file: experts/clip.py\n"
        "  removed: return top if value > top else value\n"
        "  added: return top if value >= top else value\n"
        "  reason: both sides are equal there\n",
        encoding="utf-8",
    )
    done = run(repository, "--list", "experts/clip.py")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert ">=" not in done.stdout


def test_tests_that_fail_without_a_change_are_refused(repository: Path) -> None:
    (repository / "tests/experts/test_clip.py").write_text(
        "def test_it():\n    assert False\n", encoding="utf-8"
    )
    done = run(repository, "--count", "1", "experts/clip.py")
    assert done.returncode == 1
    assert "experts/clip.py: its tests fail without any change" in done.stderr


def test_a_sample_depends_on_the_seed_alone(repository: Path) -> None:
    first = run(repository, "--list", "--count", "2", "--seed", "3", "experts/clip.py").stdout
    assert first == run(repository, "--list", "--count", "2", "--seed", "3", "experts/clip.py").stdout
    assert len(first.splitlines()) == 2


def test_a_copy_of_the_repository_has_the_folders_that_its_tests_import() -> None:
    """Without a folder that ``tests/conftest.py`` or ``harness/`` imports, each test would fail."""
    tests = {path for planted in read_planted() for path in planted.tests if path.endswith(".py")}
    files = [ROOT / "tests/conftest.py", *(ROOT / "harness").rglob("*.py"), *(ROOT / path for path in tests)]
    imports = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    found = {name for file in files for name in imports.findall(file.read_text(encoding="utf-8"))}
    ours = {name for name in found if (ROOT / name).is_dir()}
    assert "harness" in ours
    assert ours <= set(COPIED)
