"""The benchmark of the control plane at tiny size, without actors: it runs, and its growth is what it says."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks import control_plane
from benchmarks.control_plane import Size, growth, main, placing, recovering, sizes
from orchestrator.runtime.recovery import Regroup


def test_it_runs_at_tiny_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "control_plane.md"
    monkeypatch.setattr(control_plane, "ASKED", (4, 12))
    monkeypatch.setattr(
        sys, "argv", ["control_plane.py", "--largest", "64", "--repeats", "1", "--actors", "--out", str(out)]
    )
    main()
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert "| decision | 16 hosts, 64 experts | 64 hosts, 256 experts |" in text
    for what in (
        "placing: Zipf",
        "balancing: placing anew",
        "gate biases",
        "recovery: the decision",
        "plan",
        "placement event",
    ):
        (row,) = [line for line in text.splitlines() if what in line and line.startswith("|")][:1]
        assert row.count("|") == 4
    assert "4 hosts, 12 experts" in text
    assert "s per host" not in text, "actors were not asked for"


def test_growth_is_the_exponent_between_sizes() -> None:
    assert growth([1.0, 4.0, 64.0], [16, 64, 256]) == [None, pytest.approx(1.0), pytest.approx(2.0)]
    assert growth([3.0], [16]) == [None]


def test_sizes_reach_the_largest() -> None:
    assert sizes(4096)[-1] == Size(4096, 16384)
    assert [size.hosts for size in sizes(100)] == [16, 64]


def test_what_is_timed_decides() -> None:
    """The stages do what they are named after, on hosts of every kind."""
    made = [stage() for stage in placing(Size(8, 32), random.Random(0)).values()]
    assert {len(each.host_of) for each in made} == {32}  # pyright: ignore[reportAttributeAccessIssue]
    decided = recovering(Size(8, 32), random.Random(0))["recovery: the decision"]()
    assert isinstance(decided, Regroup)
    assert decided.members == (0, 1, 2, 3, 5, 6, 7)
    assert "worker was lost" in decided.reason
