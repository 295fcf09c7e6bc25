"""Tests of the shell scripts: their syntax, their values in quotes, and the nodes that they ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.errors import UserError
from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Kind, Launch, LaunchOptions

HOSTILE = "a b; touch canary; echo $HOME `touch canary` 'x' \"y\"\ntouch canary $(touch canary) @NAME@"
"""A text that leaves a file where a shell executes a part of it."""


def script(kind: Kind, *flags: str, **options: Any) -> str:
    """Return the text of a shell script, for SkyPilot the one of its run section."""
    text = file_text(Launch(LaunchOptions(kind, **options), flags))
    return yaml.safe_load(text)["run"] if kind == "skypilot" else text


SCRIPTS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("slurm", {}),
    ("ssh", {"hosts": ("one", "me@two")}),
    ("skypilot", {"gpu": "L4", "storage": "10.0.0.2:/runs"}),
)


@pytest.mark.parametrize(("kind", "options"), SCRIPTS)
def test_scripts_have_valid_syntax(kind: Kind, options: dict[str, Any]) -> None:
    text = script(kind, "--data-dir", HOSTILE, **options)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize(("kind", "options"), SCRIPTS)
def test_shellcheck_finds_nothing(kind: Kind, options: dict[str, Any]) -> None:
    command = ["shellcheck", "--shell=bash", "-"]
    text = script(kind, **options)
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("kind", "options", "settings_end"),
    [
        ("slurm", {"python": "/opt/my env/python"}, "# Several jobs may share"),
        ("ssh", {"python": "/opt/my env/python", "hosts": ("one", "me@two")}, "PORT="),
    ],
)
def test_values_reach_the_script_as_they_are(kind: Kind, options: dict[str, Any], settings_end: str) -> None:
    settings = script(kind, "--data-dir", HOSTILE, **options).partition(settings_end)[0]
    show = settings + '\nprintf \'%s\\0\' "$PYTHON" "$SHARED_FOLDER" "${TRAIN[@]}"'
    shown = subprocess.run(["bash"], input=show, capture_output=True, text=True, check=True).stdout
    python, folder, *train = shown.split("\0")[:-1]
    assert (python, folder) == ("/opt/my env/python", "/runs")
    assert train[:4] == ["/opt/my env/python", "-m", "orchestrator", "train"]
    assert train[-2:] == ["--data-dir", HOSTILE]


def test_values_reach_the_run_of_skypilot_as_they_are(tmp_path: Path) -> None:
    """The script is executed, with stubs of Ray and Python that note their arguments."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "ray").write_text("#!/usr/bin/env bash\nexec sleep 100\n")
    (programs / "python").write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$PWD" "$@" >> "$HOME/calls"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    shared = tmp_path / "it's $HOME; touch canary `touch canary`"
    shared.mkdir()
    options = {"gpu": "L4", "storage": "10.0.0.2:/runs", "run_dir": shared / "run"}
    text = script("skypilot", "--data-dir", HOSTILE, **options)
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}
    environment = os.environ | node | {"HOME": str(tmp_path)}
    ended = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().split("\0")[:-1]
    begin = calls.index("train")
    assert calls[begin - 3 : begin] == [str(shared), "-m", "orchestrator"]
    given = ["--run-dir", str(shared / "run"), "--resume", "auto", "--data-dir", HOSTILE]
    assert calls[-len(given) - 2 :] == [*given, "--ray-address", "10.0.0.1:6399"]
    assert not list(tmp_path.rglob("canary"))


def test_slurm_asks_for_one_task_on_each_node() -> None:
    lines = script("slurm", workers=16, gpus_per_node=8, cpus_per_node=96, name="mine").splitlines()
    assert lines[0] == "#!/usr/bin/env bash", "sbatch needs it in the first line"
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert {
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gres=gpu:8",
        "--signal=B:USR1@300",
        "--requeue",
    } <= set(asked)
    assert "--gres" not in script("slurm", gpus_per_node=0)


def test_a_script_for_hosts_names_each_node() -> None:
    with pytest.raises(UserError, match="--hosts names 1 hosts; 4 workers on nodes of 1 GPUs need 4"):
        script("ssh", workers=4, hosts=("one",))
    assert "HOSTS=(one me@two)" in script("ssh", hosts=("one,me@two",))


def test_a_script_ends_the_processes_of_no_one_else() -> None:
    for kind, options in SCRIPTS:
        text = script(kind, **options)
        assert "ray stop" not in text
        assert "killall" not in text


def test_skypilot_gets_the_token_as_a_secret() -> None:
    options = LaunchOptions("skypilot", workers=16, gpus_per_node=8, gpu="a100", storage="10.0.0.2:/runs")
    task = yaml.safe_load(file_text(Launch(options, ())))
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert task["envs"] == {"RAY_AUTH_MODE": "token"}
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100-80GB:8")
    assert "sudo mount -t nfs4" in task["setup"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "10.0.0.2:/runs"}, "launch skypilot needs the model of the GPUs"),
        ({"gpu": "L4"}, "launch skypilot needs storage for the run folder"),
        ({"gpu": "L4", "storage": "bucket"}, "--storage is bucket; SERVER:/EXPORT"),
        ({"gpu": "L4", "image": "x"}, "launch skypilot does not use --image"),
    ],
)
def test_skypilot_says_what_it_lacks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        script("skypilot", **options)
