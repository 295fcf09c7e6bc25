"""Mutants of small sources, and of the modules that mutation testing is meant for."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from tests.mutation.mutate import mutants
from tests.mutation.run import mutants_of, read_equivalents, read_planted
from tests.mutation.targets import TARGETS, mirrored_tests, target_files

ROOT = Path(__file__).resolve().parents[2]


def added(source: str) -> list[str]:
    return [mutant.added for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y = a < b", ["y = a <= b", "y = a >= b"]),
        ("y = a < b == c", ["y = a <= b == c", "y = a >= b == c", "y = a < b != c"]),
        ("y = a in b", ["y = a not in b"]),
        ("y = a is None", ["y = a is not None"]),
        ("y = a + b", ["y = a - b"]),
        ("y = c / a ** b", ["y = c * a ** b", "y = c / (a * b)"]),
        ("y = (a + b) * c", ["y = (a + b) / c", "y = (a - b) * c"]),
        ("y = a and b", ["y = a or b"]),
        ("y = not (a or b)", ["y = (a or b)", "y = not (a and b)"]),
        ("y = f(3, k=True)", ["y = f(4, k=True)", "y = f(3, k=False)"]),
        ("y = x[-1]", ["y = x[0]"]),
        ("y = -x", ["y = x"]),
        ("y = -(a + b)", ["y = (a + b)", "y = -(a - b)"]),
        ("y = max(a, b)", ["y = min(a, b)"]),
        ("y = x.argmin(d)", ["y = x.argmax(d)"]),
        ("x.add_(y)", ["pass"]),
        ("x += y", ["pass", "x -= y"]),
        ("x[i] = y", ["pass"]),
        ("y = a if ok else b", ["y = a if not ok else b"]),
        ("if ready(x):\n    pass", ["if not ready(x):"]),
        ("def f(n: int = 2, *, on=False): ...", ["def f(n: int = 3, *, on=False): ...", "def f(n: int = 2, *, on=True): ..."]),  # noqa: E501
        ("for x in y:\n    continue", ["pass"]),
        ("s = 'ä' + t if a < b else c", ["s = 'ä' + t if a <= b else c", "s = 'ä' + t if a >= b else c"]),
    ],
)  # fmt: skip
def test_every_kind_of_change(source: str, expected: list[str]) -> None:
    assert added(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring 1 < 2."""',
        "assert a < b, 3",
        "y = zip(a, b, strict=True)",
        "raise ValueError(f'{a + 1} < {b}')",
        "text = f'{a + 1}'",
        "text = 'a' + b",
        "log.warning('x', 3)",
        "x: Literal[1, 2]",
        "@decorated(2)\ndef f(): ...",
        "if TYPE_CHECKING:\n    y = 1 + 2",
        "class A:\n    def __init__(self, x):\n        self.x = x",
    ],
)
def test_code_that_tests_cannot_judge_is_left_alone(source: str) -> None:
    assert mutants(source) == []


def test_a_mutant_knows_its_line_and_its_diff() -> None:
    source = "x = 1\ny = (\n    a\n    + b\n)\n"
    constant, swapped = mutants(source)
    assert (constant.line, constant.removed, constant.added) == (1, "x = 1", "x = 2")
    assert (swapped.line, swapped.removed, swapped.added) == (3, "a + b", "a - b")
    assert "-x = 1\n+x = 2" in constant.diff(source, "m.py")


def test_mutants_of_the_targets_are_valid_and_different() -> None:
    """A sample of every module parses, and differs from the module in its tree, not only in its text."""
    generator = random.Random(0)
    for target in target_files(ROOT, TARGETS):
        original = ast.dump(ast.parse((ROOT / target).read_text(encoding="utf-8")))
        every = mutants_of(target)
        for mutant in generator.sample(every, min(3, len(every))):
            assert ast.dump(ast.parse(mutant.source)) != original, f"{target}:{mutant.line} {mutant.added}"


def test_every_target_exists_and_has_tests() -> None:
    for pattern in TARGETS:
        for target in target_files(ROOT, [pattern]):
            tests = mirrored_tests(ROOT, target)
            assert tests, f"{target} has no tests: name them in tests/mutation/targets.py"
        assert target_files(ROOT, [pattern]), f"no module matches {pattern}"


def test_equivalent_mutants_still_exist() -> None:
    """An entry whose mutant is gone hides nothing any more, and is removed from the list."""
    equivalents = read_equivalents()
    for target in {file for file, _, _ in equivalents}:
        known = {(mutant.removed, mutant.added) for mutant in mutants_of(target)}
        listed = {(removed, text) for file, removed, text in equivalents if file == target}
        assert listed <= known, f"{target}: {listed - known}"
    assert all(len(reason) > 10 for reason in equivalents.values())


def test_planted_faults_still_have_their_place_and_their_tests() -> None:
    for chosen in read_planted():
        missing = [name for name in chosen.tests if not (ROOT / name.partition("::")[0]).exists()]
        assert not missing, f"{chosen.target}: {missing}"
