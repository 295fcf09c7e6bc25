"""Tests of ``orchestrator launch``: the file on the screen or on the disk, and the check of its run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from harness.runs.small_flags import SMALL
from tests.cli.helpers import Call, check_answer


def test_the_file_goes_to_the_screen_and_notes_to_stderr(call: Call) -> None:
    answer = call("launch", "kuberay", "--workers", "4", "--", "--task", "text")
    assert answer.code == 0
    assert next(yaml.safe_load_all(answer.out))["kind"] == "RayJob"
    assert "--gpu H100" in answer.err


def test_nodes_without_gpus_need_no_check_of_their_memory(call: Call) -> None:
    answer = call("launch", "slurm", "--gpus-per-node", "0")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("#!/usr/bin/env bash")


def test_the_file_goes_to_the_disk_on_request(call: Call, tmp_path: Path) -> None:
    answer = call("launch", "kuberay-cluster", "--out", "cluster.yaml")
    assert (answer.code, answer.out) == (0, "")
    assert "wrote cluster.yaml" in answer.err
    assert next(yaml.safe_load_all((tmp_path / "cluster.yaml").read_text()))["kind"] == "RayCluster"


def test_the_run_is_planned_for_the_named_gpu(call: Call) -> None:
    answer = call("launch", "kuberay", "--gpu", "H100", "--", *SMALL)
    assert answer.code == 0
    assert "planned for 2 × 1 H100: step time" in answer.err


def test_a_run_that_does_not_fit_is_refused_with_what_would_do(call: Call) -> None:
    large = ("--task", "synthetic", "--width", "16384", "--layers", "24", "--experts", "2", "--samples", "32")
    answer = call("launch", "kuberay", "--gpu", "l4", "--", *large, "--sequence-length", "8")
    assert answer.code == 3
    assert "one sample needs" in answer.err
    assert answer.out == ""


def test_standby_hosts_need_devices_of_their_own(call: Call) -> None:
    flags = ("--parallel-strategy", "expert_parallel", "--spares", "1")
    refused = call("launch", "kuberay", "--workers", "4", "--gpus-per-node", "2", "--", *flags)
    accepted = call("launch", "kuberay", "--workers", "3", "--gpus-per-node", "2", "--", *flags)
    assert refused.code == 3
    assert "4 workers and 1 spare need 5 devices; 2 nodes with 2 each have 4" in refused.err
    assert accepted.code == 0


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ((), "--kind is missing"),
        (("kubernetes",), "--kind is 'kubernetes'"),
        (("kuberay", "--wrkers", "2"), "unknown flag --wrkers (did you mean --workers?)"),
        (("kuberay", "--", "--expert", "8"), "unknown flag --expert"),
        (("kuberay", "--", "--workers", "3"), "--workers stands after the --"),
        (("kuberay", "--", "--run-dir", "/x/y"), "--run-dir stands after the --"),
        (("kuberay", "--", "--resume", "auto"), "--resume stands after the --"),
        (("kuberay", "--gpu", "h100", "--gpus-per-node", "0"), "--gpu names a GPU, but --gpus-per-node is 0"),
        (("kuberay", "--gpu", "h10"), "gpu=h10 is not known"),
        (("kuberay", "--out", "missing/file.yaml"), "cannot write missing/file.yaml"),
    ],
)
def test_mistakes_are_named(call: Call, arguments: tuple[str, ...], cause: str) -> None:
    check_answer(call("launch", *arguments), cause)


def test_a_secret_is_never_written(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MY_API_KEY", "hunter2hunter2")
    answer = call("launch", "kuberay", "--out", "job.yaml", "--", "--data-dir", "/data/hunter2hunter2")
    check_answer(answer, "the file would hold a secret")
    assert "hunter2" not in answer.err
    assert not (tmp_path / "job.yaml").exists()
