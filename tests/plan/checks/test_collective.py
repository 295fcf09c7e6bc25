"""The probe of collectives, with real processes."""

from __future__ import annotations

import pytest

from orchestrator.plan.checks import collective
from orchestrator.plan.checks.collective import probe_collective


def test_three_processes_sum_and_exchange_a_tensor() -> None:
    assert probe_collective("gloo", size=3) is None


@pytest.mark.extended
def test_a_backend_that_is_missing_is_reported_with_its_error() -> None:
    problem = probe_collective("no-such-backend", size=1)
    assert problem is not None
    assert problem.startswith("rank 0 ended with code 1: ")
    assert "no-such-backend" in problem


@pytest.mark.extended
def test_wrong_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = collective._RANK_SCRIPT.replace("float(rank), device", "float(size), device")
    monkeypatch.setattr(collective, "_RANK_SCRIPT", script)
    problem = probe_collective("gloo", size=1)
    assert problem is not None
    assert "wrong rows: [1.0]" in problem
