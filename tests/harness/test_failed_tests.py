"""CI runs a few failed tests again, and never many or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness import failed_tests as module


@pytest.mark.parametrize(("failed", "most", "code"), [(0, 4, 1), (1, 4, 0), (4, 4, 0), (5, 4, 1)])
def test_a_few_failed_tests_are_named_and_run_again(
    failed: int,
    most: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = [f"tests/test_one.py::test_{number}" for number in range(failed)]
    cache = tmp_path / "lastfailed"
    cache.write_text(json.dumps(dict.fromkeys(tests, True)))
    monkeypatch.setattr(module, "_CACHE", cache)
    monkeypatch.setattr(sys, "argv", ["failed_tests", str(most)])
    assert module.main() == code
    printed = capsys.readouterr().out
    assert all((test in printed) == (code == 0) for test in tests)


def test_without_a_cache_nothing_has_failed(tmp_path: Path) -> None:
    assert module.failed_tests(tmp_path / "lastfailed") == []
