"""Tests of secrets of a task on a cluster: none is in files, output, logs of Ray or its state."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.faults.canaries import ENVIRONMENT, PATH, assert_none_in, leaky_task
from harness.hosts.cluster import local_cluster

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--width", "8", "--sequence-length", "8", "--layers", "1", "--experts", "2", "--samples", "64",
    "--batch-size", "8",
)  # fmt: skip

CLUSTER_STATE = """
import json, sys
import ray
from ray.util.state import list_actors, list_jobs, list_tasks
ray.init(address=sys.argv[1], log_to_driver=False)
options = dict(address=sys.argv[2], detail=True, limit=1000, raise_on_missing_output=False)
state = [[str(entry) for entry in query(**options)] for query in (list_jobs, list_actors, list_tasks)]
print("STATE", json.dumps(state))
"""

TRAIN = ("train", "--max-steps", "30", "--workers", "2", "--parallel-strategy")
VERBS = {
    "data_parallel": (*TRAIN, "data_parallel"),
    "expert_parallel": (*TRAIN, "expert_parallel"),
    "sweep": ("sweep", "--sweep", "learning-rate=1e-3,1e-2", "--trial-seconds", "1", "--workers", "1"),
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("known", [True, False], ids=["known to the nodes", "known to the driver"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_on_a_cluster_reveals_no_secret(
    tmp_path: Path, verb: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task prints all secrets that it can find, lets a program print some, and fails with them.

    None of them, nor the token of the cluster, is in the run folder, in the driver's output, in
    the state of the cluster, or in Ray's logs. Nodes whose environment has no secrets find them
    in the settings.
    """
    for name, value in ENVIRONMENT.items() if known else ():
        monkeypatch.setenv(name, value)
    leaky_task(tmp_path, raises=True, with_subprocess=True)
    run_dir = tmp_path / "run"
    task = ("--task", "leaky:Leaky", "--run-dir", str(run_dir), "--data-dir", PATH)
    with local_cluster(cpus=2, dashboard=True) as started:
        environment: dict[str, Any] = started.environment | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-m", "orchestrator", *VERBS[verb], *task, *SIZES]
        result = subprocess.run(
            [*program, "--ray-address", started.address],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        dashboard = f"http://127.0.0.1:{started.dashboard}"
        query = [sys.executable, "-c", CLUSTER_STATE, started.address, dashboard]
        state = subprocess.run(query, env=environment, capture_output=True, text=True, timeout=120)
        shutil.copytree(started.folder / "session_latest" / "logs", tmp_path / "ray")
        token = Path(started.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    files = [path for folder in ("run", "ray") for path in (tmp_path / folder).rglob("*.*")]
    texts = {path.name: path.read_text(errors="replace") for path in files}
    assert result.returncode == (4 if verb == "sweep" else 2), result.stdout + result.stderr
    assert "cannot log in" in (texts["sweep.jsonl"] if verb == "sweep" else result.stderr)
    # Before there is a run folder, workers write to Ray's logs.
    printed = "".join(text for name, text in texts.items() if name.startswith("worker"))
    assert ("printed ***" if known else "printed /data/***") in printed
    assert not known or verb == "sweep" or "subprocess ***" in printed
    assert "orchestrator" in state.stdout, state.stderr
    assert_none_in(run_dir)
    assert_none_in(result.stdout + result.stderr)
    assert_none_in(state.stdout.partition("STATE")[2])
    assert_none_in(tmp_path / "ray")
    written = [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    assert not [text for text in (result.stdout, result.stderr, state.stdout, *written) if token in text]
