"""``orchestrator check``: which checks it runs, what it says of them, and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from harness.fakes.inventories import machine
from orchestrator.cli import check
from orchestrator.errors import UserError
from orchestrator.plan.checks import collective
from orchestrator.plan.checks.probe_types import CheckResult, MachineProbe
from orchestrator.trainer import Trainer
from orchestrator.types import VERSION
from tests.cli.helpers import Call


@pytest.fixture
def without_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the collective, which does not start processes, and the training."""
    monkeypatch.setattr(check, "probes_for", lambda *_: ())
    monkeypatch.setattr(check, "inventory", lambda _: machine())
    monkeypatch.setattr(collective, "probe_collective", lambda *_: None)


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


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("skip", 0), ("warn", 0), ("fail", 3)])
def test_each_check_is_shown_and_a_failed_one_is_the_exit_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, status: Literal["pass", "skip", "warn", "fail"], code: int
) -> None:
    result = CheckResult("disk", status, "1 GiB free", "2 GiB free", "free some space")
    monkeypatch.setattr(check, "probes_for", lambda *_: [MachineProbe("disk", lambda: result, "")])
    monkeypatch.setattr(collective, "probe_collective", lambda *_: None)
    answer = call("check")
    assert answer.code == code
    assert "disk: 1 GiB free" in answer.out
    assert "2 processes summed and exchanged a tensor over gloo" in answer.out
    assert ("to do: free some space" in answer.out) == (status in ("fail", "warn"))
    content = json.loads(call("check", "--json").out)
    assert content["hardware"]["cores"] >= 1
    assert [(entry["name"], entry["status"]) for entry in content["checks"]] == [
        ("disk", status),
        ("collective", "pass"),
    ]


@pytest.mark.usefixtures("without_other_checks")
def test_a_full_check_trains_two_steps() -> None:
    (training,) = check.check(full=True)[1:]
    assert (training.name, training.status) == ("training", "pass"), training
    assert training.found.startswith("2 steps on ")


@pytest.mark.usefixtures("without_other_checks")
def test_a_full_check_reports_a_training_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Trainer) -> None:
        raise UserError("the weight of the model is on meta")

    monkeypatch.setattr(Trainer, "fit", fail)
    (training,) = check.check(full=True)[1:]
    assert training.status == "fail"
    assert "the weight of the model is on meta" in training.found
    assert "orchestrator train --debug" in training.fix
