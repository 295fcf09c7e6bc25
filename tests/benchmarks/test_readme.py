"""The table of benchmarks is complete, and its commands and results exist."""

from __future__ import annotations

import re
from pathlib import Path

from harness.docs.documents import ROOT, broken_links

BENCHMARKS = ROOT / "benchmarks"
README = BENCHMARKS / "README.md"
_COMMAND = re.compile(r"^\| `(python [^`]+)` \|", flags=re.MULTILINE)
_PROGRAM = re.compile(r"(?:-m (benchmarks[.\w]+)|(benchmarks/\S+)\.py)(.*)")
_RESULT = re.compile(r"\]\(results/([^)]+)\)")
_DATED = re.compile(r"(.+)_(\d{4}-\d\d-\d\d)\.\w+")


def listed() -> list[tuple[Path, str]]:
    """Return the file and the arguments of each command in the tables."""
    found = []
    for command in _COMMAND.findall(README.read_text(encoding="utf-8")):
        program = _PROGRAM.search(command)
        assert program, command
        module, path, arguments = program.groups()
        name = path or module.replace(".", "/")
        found.append((ROOT / f"{name}.py", arguments))
    return found


def is_program(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return '__name__ == "__main__"' in text or "\ndef main(" in text


def test_every_benchmark_has_a_row_and_every_row_a_benchmark() -> None:
    programs = {path for path in BENCHMARKS.rglob("*.py") if is_program(path)}
    assert len(programs) > 30
    assert {path for path, _ in listed()} == programs


def test_flags_of_the_commands_exist() -> None:
    for path, arguments in listed():
        source = path.read_text(encoding="utf-8")
        unknown = [flag for flag in re.findall(r"--[\w-]+", arguments) if f'"{flag}"' not in source]
        assert unknown == [], path.name


def test_links_lead_somewhere() -> None:
    assert broken_links(README) == []


def test_results_are_the_latest_of_their_name() -> None:
    dates: dict[str, list[str]] = {}
    for path in (BENCHMARKS / "results").iterdir():
        if dated := _DATED.fullmatch(path.name):
            dates.setdefault(dated[1], []).append(dated[2])
    named = _RESULT.findall(README.read_text(encoding="utf-8"))
    assert len(named) > 30
    for file in named:
        dated = _DATED.fullmatch(file)
        assert dated, file
        assert dated[2] == max(dates[dated[1]]), file


def test_commands_in_other_files_exist() -> None:
    """Results, pages and docstrings name benchmarks that a reader can run."""
    files = [
        *(ROOT / name for name in ("Makefile", "README.md", "CHANGELOG.md")),
        *(ROOT / "docs").glob("*.md"),
        *BENCHMARKS.rglob("*.md"),
        *BENCHMARKS.rglob("*.py"),
    ]
    named = {
        (path.name, module)
        for path in files
        for module in re.findall(r"-m (benchmarks(?:\.[a-z_]+)+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    missing = {pair for pair in named if not (ROOT / f"{pair[1].replace('.', '/')}.py").is_file()}
    assert missing == set()
