"""Wheel and source distribution hold what they should, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from orchestrator.types import VERSION
from release.build import Distributions, source_files

PACKAGES = ("orchestrator", "experts")


def wheel_names(distributions: Distributions) -> set[str]:
    with zipfile.ZipFile(distributions.wheel) as archive:
        return set(archive.namelist())


def wheel_text(distributions: Distributions, name: str) -> str:
    with zipfile.ZipFile(distributions.wheel) as archive:
        return archive.read(f"expert_orchestrator-{VERSION}.dist-info/{name}").decode()


@pytest.fixture
def metadata(distributions: Distributions) -> Message:
    return Parser().parsestr(wheel_text(distributions, "METADATA"))


@pytest.mark.extended
def test_the_wheel_holds_every_file_of_the_packages_and_no_other(distributions: Distributions) -> None:
    expected = {name for name in source_files() if name.split("/")[0] in PACKAGES}
    found = {name for name in wheel_names(distributions) if ".dist-info/" not in name}
    assert sorted(found ^ expected) == [], "data files are listed in pyproject.toml, package-data"


@pytest.mark.skipif(shutil.which("git") is None, reason="git lists the files to pack")
def test_only_tracked_files_are_packed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    names = ["tests/test_it.py", "tests/deleted.py", "tests/notes.txt", "tests/ignored.log", ".gitignore"]
    for name in names:
        (tmp_path / name).write_text("*.log\n", encoding="utf-8")
    tracked = [".gitignore", "tests/deleted.py", "tests/test_it.py"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", *tracked], cwd=tmp_path, check=True)
    (tmp_path / "tests" / "deleted.py").unlink()
    assert source_files(tmp_path) == [".gitignore", "tests/test_it.py"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        "orchestrator/py.typed",
        "experts/py.typed",
        "orchestrator/config/names/foreign_names.yaml",
        "orchestrator/plan/cost/devices.json",
        "orchestrator/launch/templates/slurm.sbatch",
        "orchestrator/launch/templates/hosts.sh",
        "orchestrator/report/draw/page.css",
        "orchestrator/report/draw/page.js",
    ],
)
def test_data_files_are_in_the_wheel(distributions: Distributions, name: str) -> None:
    assert name in wheel_names(distributions)


@pytest.mark.extended
def test_the_source_distribution_is_the_repository(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    found = {name.partition("/")[2] for name in files}
    written = {name for name in found if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert sorted((found - written) ^ set(source_files())) == [], "folders are listed in MANIFEST.in"


@pytest.mark.extended
def test_the_metadata_name_version_licence_and_command(
    distributions: Distributions, metadata: Message
) -> None:
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "orchestrator = orchestrator.cli.main:main" in wheel_text(distributions, "entry_points.txt")
    assert "Apache License" in wheel_text(distributions, "licenses/LICENSE")
