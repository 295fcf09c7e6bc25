"""The Slurm script with stubs of ``srun`` and Ray: its token, its ports and its folders."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions
from tests.launch.test_slurm_run import SRUN

PYTHON = f"""#!{sys.executable}
import json, os, signal, socket, sys, time
from pathlib import Path

calls = Path(os.environ["CALLS"])
arguments = sys.argv[1:]
if arguments[0] == "-c" and "ray" in arguments[1]:
    print("127.0.0.1")
elif arguments[0] == "-c":
    os.execv(sys.executable, [sys.executable, *arguments])
elif "ray" in arguments[1] or "train" in arguments:
    kind = "node-" + os.environ["SLURM_PROCID"] if "ray" in arguments[1] else "run"
    temporary = [part.partition("=")[2] for part in arguments if part.startswith("--temp-dir=")]
    modes = [os.stat(path).st_mode for path in temporary if os.path.exists(path)]
    call = {{"arguments": arguments, "environment": dict(os.environ), "modes": modes}}
    (calls / (kind + ".part")).write_text(json.dumps(call))
    os.rename(calls / (kind + ".part"), calls / kind)
    ports = [int(part[7:]) for part in arguments if part.startswith("--port=")]
    listener = socket.create_server(("127.0.0.1", ports[0])) if ports else None
    if kind != "run":
        signal.pause()
else:
    while len(list(calls.glob("node-?"))) < 2:
        time.sleep(0.05)
"""
JOB = 987_654_321
"""Greater than the numbers of other tests."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "runs").mkdir()
    for name, text in (("srun", SRUN), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    yield tmp_path
    for path in Path("/tmp").glob(f"ray-{JOB // 10}*"):
        shutil.rmtree(path)


def start(folder: Path, number: int) -> dict[str, Any]:
    """Run a job of two nodes, and return the calls of Ray and of the run."""
    python = str(folder / "bin" / "python")
    run_dir = folder / "runs" / "mine"
    options = LaunchOptions("slurm", workers=2, gpus_per_node=0, run_dir=run_dir, python=python)
    (folder / "slurm.sbatch").write_text(file_text(Launch(options, ())), encoding="utf-8")
    calls = folder / f"calls-{number}"
    calls.mkdir()
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "RAY_AUTH_TOKEN_PATH": "/another/token",
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    script = ["bash", str(folder / "slurm.sbatch")]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return {path.name: json.loads(path.read_text()) for path in calls.iterdir()}


def option(call: dict[str, Any], name: str) -> str:
    (value,) = [part.partition("=")[2] for part in call["arguments"] if part.startswith(f"{name}=")]
    return value


def test_the_token_of_a_job_is_in_no_file_and_no_command_line(folder: Path) -> None:
    """Another user of the shared folder may have made the files that a script could write to."""
    planted = folder / "runs" / f".ray-token-{JOB}"
    planted.touch(mode=0o666)
    calls = start(folder, JOB)
    assert set(calls) == {"node-0", "node-1", "run"}
    environments = [call["environment"] for call in calls.values()]
    (token,) = {environment.get("RAY_AUTH_TOKEN") for environment in environments}
    assert token is not None
    assert len(token) == 64
    assert {environment["RAY_AUTH_MODE"] for environment in environments} == {"token"}
    assert not [environment for environment in environments if "RAY_AUTH_TOKEN_PATH" in environment]
    assert not [call for call in calls.values() if token in " ".join(call["arguments"])]
    assert planted.read_text() == ""
    assert list((folder / "runs").iterdir()) == [planted]
    other = start(folder, JOB + 1)["run"]["environment"]["RAY_AUTH_TOKEN"]
    assert other != token


def test_jobs_on_one_node_share_neither_ports_nor_folders(folder: Path) -> None:
    """Not even a job that is queued again and the folder that its number had before."""
    planted = [Path(f"/tmp/ray-{JOB}-{rank}") for rank in range(2)]
    for path in planted:
        path.mkdir(mode=0o777)
    jobs = [start(folder, JOB), start(folder, JOB + 1)]
    nodes = [job[name] for job in jobs for name in ("node-0", "node-1")]
    folders = [Path(option(node, "--temp-dir")) for node in nodes]
    assert len({*folders, *planted}) == len(nodes) + len(planted)
    assert {stat.S_IMODE(mode) for node in nodes for mode in node["modes"]} == {0o700}
    heads = [option(job["node-0"], "--port") for job in jobs]
    assert len(set(heads)) == len(heads)
    # 0: the agent takes any port that is free.
    assert {option(node, "--dashboard-agent-listen-port") for node in nodes} == {"0"}
