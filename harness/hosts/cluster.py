"""A Ray cluster of real raylets on this machine.

Each raylet has a process group of its own and is killed by that group. ``ray stop`` would stop the
clusters of others too."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_START_SECONDS = 90
_NODE_STARTS = 3
_OVERLOADED = "timed out during startup"
"""In the output of a node that Ray gave up after 30 s: a busy head node may not answer in time."""


class RayCluster:
    """A head node, and nodes that can be added and killed."""

    def __init__(self, cpus: int, gpus: int = 0, dashboard: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
        self.environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(write_token(self.folder)),
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.dashboard = free_port() if dashboard else None
        options = [
            "--head",
            "--port=0",
            f"--include-dashboard={str(dashboard).lower()}",
            f"--temp-dir={self.folder}",
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
        ]
        if self.dashboard:
            options.append(f"--dashboard-port={self.dashboard}")
        self._start(*options)
        self.address = self._wait_for_address()

    def add_node(self, cpus: int, gpus: int = 0, private: Sequence[Path] = ()) -> int:
        """Add a node. Return its number.

        It has an empty disk of its own in place of each ``private`` folder."""
        for _ in range(_NODE_STARTS):
            number = self._start_node(cpus, gpus, private)
            if number is not None:
                return number
        raise AssertionError(f"no node started:\n{self._output(len(self.nodes) - 1)}")

    def kill_node(self, number: int) -> None:
        """Kill a raylet and all its workers at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.nodes[number].pid, signal.SIGKILL)
        for pid in processes_of_session(self.nodes[number].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for number, node in enumerate(self.nodes):
            self.kill_node(number)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_node(self, cpus: int, gpus: int, private: Sequence[Path]) -> int | None:
        """Return the number of a new node, None if Ray gave it up."""
        number = len(self.nodes)
        # Nodes unpack jobs into their folder: each has its own, as on a machine of its own.
        folder = self.folder / f"n{number}"
        options = (f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={folder}")
        self._start(f"--address={self.address}", *options, private=private)

        def is_given_up() -> bool:
            return self.nodes[number].poll() is not None and _OVERLOADED in self._output(number)

        self._wait_until(lambda: self._is_started(number) or is_given_up(), "a node did not start")
        if self._is_started(number):
            return number
        self.kill_node(number)
        return None

    def _start(self, *arguments: str, private: Sequence[Path] = ()) -> None:
        # The default port of the agent can be used once per machine.
        agent = f"--dashboard-agent-listen-port={free_port()}"
        command = [*RAY, "start", *arguments, agent, "--block", "--disable-usage-stats"]
        if private:
            mounts = [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in private]
            command = ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, shlex.join(command)])]
        with open(self.folder / f"node_{len(self.nodes)}.log", "wb") as log:
            node = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self.nodes.append(node)

    def _is_started(self, number: int) -> bool:
        return "Ray runtime started" in self._output(number)

    def _output(self, number: int) -> str:
        return (self.folder / f"node_{number}.log").read_text(encoding="utf-8", errors="replace")

    def _wait_for_address(self) -> str:
        pattern = r"--address='?([0-9.]+:\d+)'?"

        def is_started() -> bool:
            output = self._output(0)
            return re.search(pattern, output) is not None and self._is_started(0)

        self._wait_until(is_started, "the head did not start")
        match = re.search(pattern, self._output(0))
        assert match
        return match[1]

    def _wait_until(self, condition: Callable[[], bool], message: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{message}:\n{self._output(len(self.nodes) - 1)}"
            time.sleep(0.1)


def _can_have_private_disks() -> bool:
    """Whether a process may mount a disk that others do not see."""
    try:
        command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_private_disks = pytest.mark.skipif(
    not _can_have_private_disks(),
    reason="mounts of a process's own (unshare --mount) are not allowed here",
)


def write_token(folder: Path) -> Path:
    """Write the token by which the nodes of a cluster know each other. Return its file."""
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write("a-token-of-the-tests-" + "0" * 32)
    return path


def processes_of_session(leader: int) -> list[int]:
    """Return the processes of a session.

    Those that a raylet started have process groups of their own."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def local_cluster(cpus: int, gpus: int = 0, dashboard: bool = False) -> Iterator[RayCluster]:
    cluster = RayCluster(cpus, gpus, dashboard)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def connected(cluster: RayCluster) -> Iterator[str]:
    """Connect this process to a cluster. Yields the id of the node."""
    # Here, because most tests need no Ray and its import takes a second.
    import ray

    from orchestrator.runtime.ray_internals import reload_auth_mode

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, cluster.environment[name])
        reload_auth_mode()
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield str(ray.get_runtime_context().get_node_id())
        finally:
            ray.shutdown()
    reload_auth_mode()
