"""Each benchmark can be imported, and ``--help`` describes it.

A helper that was renamed or moved breaks a benchmark before it has read its arguments."""

from __future__ import annotations

from importlib import import_module

import pytest

from harness.runs.benchmark_runs import BENCHMARKS, programs, run_main


def test_the_programs_are_found() -> None:
    found = programs()
    assert len(found) > 30
    assert {"code_style", "moe.moe_layer", "recovery.plain_chaos"} <= set(found)
    has_main = {path for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert len(has_main) == len(found), "each program has a main function"


@pytest.mark.parametrize("name", programs())
def test_help_describes_the_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        run_main(module, "--help")
    assert ended.value.code == 0
    assert module.__doc__
    assert module.__doc__.strip() in capsys.readouterr().out
