"""The documentation site, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.docs.documents import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does: a warning ends it. Return its folder."""
    pytest.importorskip("mkdocs", reason="the site needs pip install 'expert-orchestrator[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder
