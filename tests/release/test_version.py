"""The version stands in one place, ``orchestrator.types``; everything else that names it agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from harness.docs.documents import PAGES, page_name
from orchestrator.cli.main import main
from orchestrator.types import VERSION
from release.build import ROOT

NAMED = re.compile(r"expert[-_]orchestrator[:-](\d+\.\d+\.\d+\w*)")
CLUSTER_FILES = [path for path in (ROOT / "cluster").rglob("*") if path.suffix in ("", ".yaml", ".sbatch")]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"expert-orchestrator {VERSION}\n"


def test_pyproject_reads_it_from_the_code() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "orchestrator.types.VERSION"}


@pytest.mark.parametrize("path", [*PAGES, *(path for path in CLUSTER_FILES if path.is_file())], ids=page_name)
def test_pages_and_cluster_files_name_this_version(path: Path) -> None:
    named = set(NAMED.findall(path.read_text(encoding="utf-8")))
    assert named <= {VERSION}


def test_the_changelog_begins_with_what_is_not_released_or_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert headings[0] in ("Unreleased", VERSION)
