"""Tests of the entry of the command line: verbs, help, exit codes, and errors that are not the user's."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.runs.small_flags import SMALL
from orchestrator.cli.main import USAGE, VERBS
from orchestrator.config.settings import flat_names
from tests.cli.helpers import Call, run_program


def test_a_missing_gpu_has_the_exit_code_of_resources(call: Call, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = call("plan", *SMALL, "--gpu-mode", "single_gpu")
    assert answer.code == 3
    assert answer.lines[0].startswith("orchestrator: --gpu-mode single_gpu needs one GPU; 0 were found")
    assert len(answer.lines) <= 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_the_exit_code_of_resources(call: Call, monkeypatch: pytest.MonkeyPatch, number: int):
    def full(argv: object) -> int:
        raise OSError(number, os.strerror(number), "/data/model.safetensors")

    monkeypatch.setattr("orchestrator.cli.export.run", full)
    answer = call("export", "run", "folder")
    assert answer.code == 3
    expected = f"orchestrator: {os.strerror(number)}: /data/model.safetensors; make room, or lift the quota"
    assert answer.lines == [expected]


def test_a_bug_of_ours_keeps_its_traceback(call: Call, monkeypatch: pytest.MonkeyPatch):
    def broken(argv: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("orchestrator.cli.plan.run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        call("plan")


def test_help_names_every_verb_and_exit_code(call: Call):
    answer = call("--help")
    assert answer.code == 0
    assert answer.out.strip() == USAGE.strip()
    assert [verb for verb in VERBS if not re.search(rf"^  {verb} ", answer.out, re.MULTILINE)] == []
    assert call().code == 2
    assert re.fullmatch(r"expert-orchestrator \d+\.\d+\.\d+\n", call("--version").out)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(call: Call, verb: str):
    answer = call(verb, "--help")
    assert answer.code == 0
    assert f"orchestrator {verb}" in answer.out
    if verb in ("train", "plan", "bench"):
        text = answer.out.replace("{", " ").replace("|", " ").replace(",", " ")
        flags = {name: name.replace("_", "-") for name in flat_names()}
        missing = [name for name, flag in flags.items() if not re.search(rf"--(no-)?{flag}\b", text)]
        assert missing == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error(tmp_path: Path, unbuffered: str):
    command = [sys.executable, "-m", "orchestrator", "sweep", "--help"]
    environment = dict(os.environ) | {
        "PYTHONUNBUFFERED": unbuffered,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 141


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize("verb", VERBS)
def test_help_imports_nothing_heavy(tmp_path: Path, verb: str):
    result = run_program(tmp_path, verb, "--help", options=("-X", "importtime"))
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "tyro" in imported
    assert imported.isdisjoint({"torch", "ray", "pandas", "matplotlib", "numpy", "sklearn", "pydantic"})


def test_flags_are_read_without_the_library_that_makes_the_help(tmp_path: Path):
    code = (
        "import sys; from orchestrator.cli.train import TrainOptions; "
        "from orchestrator.config.reading.flags import read_flags; "
        "read_flags(TrainOptions, ['--epochs', '3', '--compile'], 'x'); print('tyro' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


def test_a_node_without_our_packages_is_answered_in_one_line(tmp_path: Path):
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    # Without -S Python would find the packages of this environment.
    command = [sys.executable, "-S", "-B", "-m", "orchestrator", "plan"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert "has no package" in line
    assert "pip install expert-orchestrator" in line
