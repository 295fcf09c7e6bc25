"""The head of a result names the command that makes it again."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import code_style, support
from benchmarks.moe import placement


@pytest.mark.parametrize("module", [placement, code_style])
def test_the_command_has_the_groups_of_the_benchmark(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m`` puts the path of the module into ``sys.argv``."""
    name, path = vars(module)["__name__"], vars(module)["__file__"]
    monkeypatch.setattr(sys, "argv", [path, "--seed", "3"])
    text = support.header("Title", argparse.Namespace(seed=3, out=None))
    assert f"Command: `python -m {name} --seed 3`\n" in text
