"""The README is true: its commands run, its Python runs, its flags are all the flags."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.settings import flat_names

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if line.startswith("orchestrator ")
]


def test_a_command_within_the_first_twenty_lines() -> None:
    assert any(line.startswith("make train") for line in TEXT.splitlines()[:20])


def test_every_flag_is_told_of_and_no_other() -> None:
    known = {f"--{name.replace('_', '-')}" for name in flat_names()}
    assert known <= set(re.findall(r"--[a-z][a-z0-9-]+", TEXT))
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \|", TEXT, flags=re.MULTILINE)
    assert set(rows) == known


def test_the_commands_run(tmp_path: Path) -> None:
    """In order, in one folder, as a reader would; ``check`` has tests of its own."""
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        words = shlex.split(command)
        if words[1] == "check":
            continue
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [block for kind, block in BLOCKS if kind == "python"])
def test_the_python_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "example.py"]
    if "class MyTask" in block:
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "train",
            "--task",
            "example:MyTask",
            "--max-steps",
            "5",
        ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results").is_dir()
