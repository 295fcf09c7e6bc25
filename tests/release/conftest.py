"""The distributions, built once for all tests of the release."""

from __future__ import annotations

import shutil

import pytest

from release.build import ROOT, Distributions, build


@pytest.fixture(scope="package")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git lists the files to build, and this folder is no repository")
    return build(tmp_path_factory.mktemp("dist"))
