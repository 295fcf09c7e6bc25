"""``orchestrator check``: which collectives it runs, and what it says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from harness.fakes.inventories import machine
from orchestrator.cli import check
from orchestrator.plan.checks import collective
from orchestrator.types import VERSION


@pytest.mark.parametrize(
    ("num_gpus", "may_share", "ranks"), [(1, False, 1), (1, True, 2), (2, False, 2), (8, True, 8)]
)
def test_nccl_runs_a_process_on_each_gpu(num_gpus: int, may_share: bool, ranks: int) -> None:
    assert check._nccl_ranks(num_gpus, may_share) == ranks


def test_the_commit_of_the_folder_is_no_version_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inventory = replace(machine(), versions={"ray": "2.60.0"}, commit="f00d")
    Console(width=400).print(check._hardware_table(inventory))
    rows = capsys.readouterr().out.splitlines()
    versions = next(row for row in rows if "versions" in row)
    assert f"expert-orchestrator {VERSION}, ray 2.60.0" in versions
    assert "f00d" not in versions
    assert any("this folder" in row and "commit f00d" in row for row in rows)


def test_a_collective_of_one_process_does_not_claim_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "probe_collective", lambda *_: None)
    result = check._probe_collective("NCCL", "nccl", 1)
    assert result.status == "pass"
    assert result.found.startswith("one process summed and exchanged a tensor over nccl; between GPUs")


def test_a_failed_collective_names_what_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "probe_collective", lambda *_: "no answer within 90 s")
    result = check._probe_collective("NCCL", "nccl", 4)
    assert (result.status, result.found) == ("fail", "no answer within 90 s")
    assert "between 4 processes" in result.needed
