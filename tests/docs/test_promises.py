"""Tests that pages name exist, and run by the command that the page of promises says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from harness.docs.documents import ROOT

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_TIERS = {"gpu": "gpu", "slow": "slow", "extended": "test-all"}  # the first that a test is marked with


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@cache
def tiers_of(file: str) -> dict[str, str]:
    """Return the tests of a file, and by which command each of them runs."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    module_marks = [mark for statement in body for mark in _module_marks(statement)]
    functions = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
    return {function.name: _tier([*module_marks, *function.decorator_list]) for function in functions}


def _module_marks(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != "pytestmark":
        return []
    return statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]


def _tier(marks: list[ast.expr]) -> str:
    """Return the command of a test; ``extended(but_first=N)`` leaves some of its cases to ``make test``."""
    texts = [ast.unparse(mark) for mark in marks]
    names = {text.removeprefix("pytest.mark.").partition("(")[0] for text in texts if "but_first" not in text}
    return next((tier for mark, tier in _TIERS.items() if mark in names), "test")


@pytest.mark.parametrize(("name", "least"), [("expert-mathematics.md", 15), ("promises.md", 150)])
def test_tests_that_prove_a_claim_exist(name: str, least: int) -> None:
    named = _TEST.findall(page(name))
    assert len(named) > least
    missing = [f"{file}::{test}" for file, test in named if test not in tiers_of(file)]
    assert missing == []


def test_each_promise_has_a_test_and_the_command_that_runs_it() -> None:
    rows = [line.strip("| ").split(" | ") for line in page("promises.md").splitlines() if "::" in line]
    promises = [cells[0] for cells in rows]
    assert len(rows) == len(set(promises)) > 100
    for _, tests, commands in rows:
        named = _TEST.findall(tests)
        tiers = [tiers_of(file)[test] for file, test in named]
        expected = tiers[0] if len(set(tiers)) == 1 else ", ".join(tiers)
        assert commands == expected, named


def test_the_command_of_a_test_follows_its_marks() -> None:
    cases = {
        "pytest.mark.ray": "test",
        "pytest.mark.extended": "test-all",
        "pytest.mark.extended(but_first=2)": "test",
        "pytest.mark.slow": "slow",
        "pytest.mark.gpu": "gpu",
    }
    found = {text: _tier([ast.parse(text, mode="eval").body]) for text in cases}
    assert found == cases
    both = [ast.parse(f"pytest.mark.{mark}", mode="eval").body for mark in ("extended", "slow")]
    assert _tier(both) == "slow"
