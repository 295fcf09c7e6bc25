"""The script for hosts over ssh for real: two names of this machine as hosts, each with a raylet.

A stub in place of ``ssh`` runs the commands here, through ``sh`` as a server would."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.hosts.cluster import free_port, processes_of_session
from harness.runs.cli_runs import QUIET, SIZES, read_summary
from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions

SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 255
shift 3
exec sh -c "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """A script, and the folder with its stub, the home of its hosts and its run."""

    folder: Path
    port: int

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "mine"

    @property
    def state(self) -> Path:
        return self.folder / "home" / ".expert-orchestrator" / "training"

    def call(self, word: str, code: int = 0) -> str:
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "RAY_PORT": str(self.port),
            "RAY_TMPDIR": f"/tmp/ray-hosts-{self.port}",
        }
        done = subprocess.run(
            ["bash", str(self.folder / "hosts.sh"), word],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=400,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def sessions(self) -> list[int]:
        """Return the leaders of the sessions that the script has recorded."""
        return [int(path.read_text().split()[0]) for path in self.state.glob("*/node")]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    for name in ("bin", "home", "runs"):
        (tmp_path / name).mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    options = LaunchOptions(
        "ssh",
        workers=2,
        gpus_per_node=0,
        cpus_per_node=1,
        hosts=("here", "me@there"),
        run_dir=tmp_path / "runs" / "mine",
        python=sys.executable,
    )
    flags = (*SIZES, *QUIET, "--max-steps", "6")
    (tmp_path / "hosts.sh").write_text(file_text(Launch(options, flags)), encoding="utf-8")
    found = Hosts(tmp_path, free_port())
    try:
        yield found
    finally:
        for leader in found.sessions():
            for pid in processes_of_session(leader):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(f"/tmp/ray-hosts-{found.port}", ignore_errors=True)


def wait_for_end(leaders: list[int]) -> None:
    """Wait until a killed session is gone: the system needs a moment for each process."""
    deadline = time.monotonic() + 60
    while left := [pid for leader in leaders for pid in processes_of_session(leader)]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.2)


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_hosts_are_started_train_and_are_stopped(hosts: Hosts) -> None:
    assert hosts.call("start").count("started Ray on") == 2
    leaders = hosts.sessions()
    tokens = [path.read_text() for path in hosts.state.glob("*/token")]
    assert len(set(tokens)) == 1
    assert {path.stat().st_mode & 0o777 for path in hosts.state.glob("*/token")} == {0o600}
    assert hosts.call("start").count("runs already") == 2, "what runs is not started twice"
    assert hosts.call("status").count("node runs") == 2

    assert "completed" in hosts.call("train")
    assert (read_summary(hosts.run_dir)["status"], read_summary(hosts.run_dir)["workers"]) == ("completed", 2)

    hosts.call("stop")
    wait_for_end(leaders)
    assert hosts.call("status").count("no node") == 2
    assert not list(hosts.state.glob("*/token"))


def test_stop_leaves_a_process_that_it_did_not_start(hosts: Hosts) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            record = hosts.state / "here" / "node"
            record.parent.mkdir(parents=True)
            record.write_text(f"{stranger.pid} Mon Jan 1 00:00:00 2001\n")
            hosts.call("stop")
            assert stranger.poll() is None
            assert not record.exists()
        finally:
            stranger.kill()


def test_an_unknown_word_is_answered_with_the_known_ones(hosts: Hosts) -> None:
    assert "start|train|status|stop" in hosts.call("begin", code=2)
