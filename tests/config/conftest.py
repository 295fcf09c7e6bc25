"""Fixtures of the tests of settings."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a file that each test may overwrite; a module writes many."""
    return tmp_path_factory.mktemp("config") / "cfg.yaml"
