"""The benchmark of the control plane at tiny size, without actors: it runs, and its growth is what
it says.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks.planning import control_plane
from benchmarks.planning.control_plane import growth, main, sizes
from benchmarks.planning.control_plane_stages import Size, placing, recovering
from experts.placement.placement import Placement
from orchestrator.runtime.recovery import Regroup

ROWS = (
    "placing: Zipf",
    "balancing: placing anew",
    "gate biases",
    "recovery: the decision",
    "plan",
    "placement event",
)


@pytest.mark.extended
def test_it_runs_at_tiny_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "control_plane.md"
    flags = ["--largest", "64", "--repeats", "1", "--actors", "--out", str(out)]
    monkeypatch.setattr(control_plane, "LIMIT_SIZE", (4, 12))
    monkeypatch.setattr(sys, "argv", ["control_plane.py", *flags])
    main()
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert "| decision | 16 hosts, 64 experts | 64 hosts, 256 experts |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for name in ROWS:
        row = next(line for line in lines if name in line)
        assert row.count("|") == 4
    assert "4 hosts, 12 experts" in text
    assert "s per host" not in text, "no actors were requested"


def test_growth_is_the_exponent_between_sizes() -> None:
    assert growth([1.0, 4.0, 64.0], [16, 64, 256]) == [None, pytest.approx(1.0), pytest.approx(2.0)]
    assert growth([3.0], [16]) == [None]


def test_sizes_reach_the_largest() -> None:
    assert sizes(4096)[-1] == Size(4096, 16384)
    assert [size.hosts for size in sizes(100)] == [16, 64]


def test_stages_decide_what_they_are_named_after() -> None:
    placements = [stage() for stage in placing(Size(8, 32), random.Random(0)).values()]
    assert all(isinstance(placement, Placement) for placement in placements)
    assert {len(placement.host_of) for placement in placements if isinstance(placement, Placement)} == {32}
    decision = recovering(Size(8, 32), random.Random(0))["recovery: the decision"]()
    assert isinstance(decision, Regroup)
    assert decision.members == (0, 1, 2, 3, 5, 6, 7)
    assert "worker was lost" in decision.reason
