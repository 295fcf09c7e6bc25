"""Tests of the start of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.reading import read_events
from orchestrator.runtime import bootstrap
from orchestrator.runtime.bootstrap import Assignment, DriverRequests, RequestReader
from orchestrator.train.group.requests import Requests

REDIRECT_OFTEN = """
import os, sys
from pathlib import Path
from orchestrator.runtime.bootstrap import redirect_output

folder = Path(sys.argv[1])
kept = []  # libraries keep the streams that they first saw
for rank in range(5):
    redirect_output(folder, rank, ["sesame"])
    kept.append((sys.stdout, sys.stderr))
    if rank == 0:
        before = len(os.listdir("/proc/self/fd"))
print(len(os.listdir("/proc/self/fd")) - before, "more files, open sesame")
os.write(2, b"from a library\\n")
print("kept", file=kept[0][1])
"""


@pytest.mark.extended
def test_output_is_redirected_again_without_a_further_open_file(tmp_path: Path) -> None:
    """A host redirects its output whenever it joins a group, with another rank perhaps."""
    command = [sys.executable, "-c", REDIRECT_OFTEN, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(4)] == [""] * 4
    words = (tmp_path / "worker_4.log").read_text().splitlines()
    assert words == ["0 more files, open ***", "from a library", "kept"]


@pytest.mark.parametrize("found", [None, "", "another run"])
def test_a_worker_that_does_not_see_the_run_folder_is_refused_before_it_starts(
    tmp_path: Path, found: str | None
) -> None:
    """A node without the shared drive has no such folder, or one of its own."""
    logs = tmp_path / "logs"
    prepared: Any = None
    assignment = Assignment(prepared, tmp_path, tmp_path, "this run", None)
    if found is not None:
        logs.mkdir()
        (logs / bootstrap.NONCE_FILE).write_text(found)
    with pytest.raises(UserError, match=f"worker 3 on .* does not see the run folder {tmp_path}"):
        bootstrap.check_run_dir(assignment, "worker 3")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ([] if found is None else ["logs", "nonce"])
    logs.mkdir(exist_ok=True)
    (logs / bootstrap.NONCE_FILE).write_text("this run")
    bootstrap.check_run_dir(assignment, "worker 3")


def test_a_group_that_is_formed_again_is_not_asked_for_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group has saved what a callback asked for; a request to end is for every group."""
    monkeypatch.setattr(bootstrap, "_POLL_SECONDS", -1.0)
    logs = tmp_path / "logs"
    logs.mkdir()
    prepared: Any = None
    assignment = Assignment(prepared, tmp_path, tmp_path, "", None)
    first = RequestReader(assignment, 0)
    assert first() == Requests()
    DriverRequests(num_saves=1).write(logs)
    assert first() == Requests(save=True)
    assert first() == Requests()
    second = RequestReader(assignment, 0)
    assert second() == Requests()
    DriverRequests(end="enough", num_saves=2).write(logs)
    assert second() == Requests(end="enough", save=True)
    assert RequestReader(assignment, 0)() == Requests(end="enough")


@pytest.mark.parametrize("set_before", [None, "ib0"])
def test_a_worker_sets_the_variables_of_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_before: str | None
) -> None:
    """It takes the interface of the node's address in the cluster, but for one that the user has named."""
    names = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
    if set_before is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", set_before)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    interfaces = {"lo": "127.0.0.1", "eth1": "10.0.0.7", "eth2": "10.1.0.7"}
    entries = {name: [SimpleNamespace(address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(bootstrap.psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(bootstrap.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    bootstrap.enter_working_dir(tmp_path, nccl_debug=True, secrets=())
    found = [os.environ[name] for name in names]
    assert found == ["INFO", set_before or "eth1", "eth1", "expandable_segments:True"]


def test_the_main_worker_alone_writes_the_record(tmp_path: Path) -> None:
    prepared: Any = SimpleNamespace(hidden=())
    assignment = Assignment(prepared, tmp_path, tmp_path, "", None)
    for rank in (2, 0, 1):
        with bootstrap.open_log(assignment, rank) as log:
            log.write(kinds.Warned(kind="data", message=f"of worker {rank}"))
    assert [event["message"] for event in read_events(tmp_path / "events.jsonl")] == ["of worker 0"]
