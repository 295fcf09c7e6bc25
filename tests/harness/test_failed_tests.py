"""CI runs a few failed tests again, and never many or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness import failed_tests as module


@pytest.mark.parametrize(
    ("failed", "ended", "code"), [(0, 1, 1), (1, 1, 0), (4, 1, 0), (5, 1, 1), (1, 2, 1), (1, 3, 1)]
)
def test_a_few_failed_tests_are_named_and_run_again(
    failed: int,
    ended: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = [f"tests/test_one.py::test_{number}" for number in range(failed)]
    for name, value in {"cache/lastfailed": dict.fromkeys(tests, True), module.ENDED: ended}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    monkeypatch.setattr(module, "_CACHE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["failed_tests", "4"])
    assert module.main() == code
    printed = capsys.readouterr().out
    assert all((test in printed) == (code == 0) for test in tests)


def test_without_a_cache_nothing_has_failed(tmp_path: Path) -> None:
    assert module.failed_tests(tmp_path) == []
