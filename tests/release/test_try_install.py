"""The wheel works outside of the repository.

Its dependencies are those of this environment, so that nothing is downloaded; ``make try-install`` installs
them as well.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from release.build import Distributions
from release.try_install import check_commands


@pytest.fixture
def environment(distributions: Distributions, tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The path alone: its own *.pth files, one of which may lead to this repository, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    offline = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    # A fresh clone has this version installed in editable mode, which pip would find by the path.
    offline.append("--ignore-installed")
    target = ["--python", str(folder / "bin" / "python")]
    command = [sys.executable, "-m", "pip", *target, "install", *offline, str(distributions.wheel)]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.extended
def test_commands_of_the_installed_wheel_run_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    check_commands(environment, folder)


@pytest.mark.extended
def test_a_data_file_that_is_missing_is_noticed(environment: Path, tmp_path: Path) -> None:
    for template in environment.glob("lib/python*/site-packages/orchestrator/launch/templates/*"):
        template.unlink()
    with pytest.raises(RuntimeError, match="launch slurm"):
        check_commands(environment, tmp_path)
