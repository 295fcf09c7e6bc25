"""Fixture of the tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from tests.cli.helpers import Answer, Call


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs ``orchestrator …`` in this process, in an empty folder.

    The module ``mine`` that a task of the folder is in is forgotten after each call.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*argv: str) -> Answer:
        capfd.readouterr()
        try:
            code = main(argv)
        except SystemExit as stop:  # raised by the flag parser
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.modules.pop("mine", None)
        captured = capfd.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
