"""A Ray cluster of real raylets on this machine, each in a process group of its own, ended by that group. ``ray stop`` would
end everyone's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Cluster:
    """A head, and nodes that may be added and killed."""

    def __init__(self, cpus: int, gpus: int = 0, dashboard: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets want a short path
        self.environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token()),
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.dashboard = _free_port() if dashboard else None
        extra = [f"--dashboard-port={self.dashboard}"] if self.dashboard else []
        head = ["--head", "--port=0", f"--include-dashboard={str(dashboard).lower()}", *extra]
        self._start(*head, f"--temp-dir={self.folder}", f"--num-cpus={cpus}", f"--num-gpus={gpus}")
        self.address = self._found(r"--address='?([0-9.]+:\d+)'?")

    def _token(self) -> Path:
        path = self.folder / "token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("a-token-of-the-tests-" + "0" * 32)
        return path

    def add_node(self, cpus: int, gpus: int = 0) -> int:
        own = (
            self.folder / f"n{len(self.nodes)}"
        )  # a folder of its own, as on a host of its own: nodes unpack jobs into it
        self._start(
            f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={own}"
        )
        self._wait(lambda: "Ray runtime started" in self._said(len(self.nodes) - 1), "a node did not start")
        return len(self.nodes) - 1

    def kill_node(self, number: int) -> None:
        """The raylet and all its workers, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.nodes[number].pid, signal.SIGKILL)
        for child in _of_session(self.nodes[number].pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def close(self) -> None:
        for number in range(len(self.nodes)):
            self.kill_node(number)
            self.nodes[number].wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *arguments: str) -> None:
        with open(self.folder / f"node_{len(self.nodes)}.log", "wb") as log:
            agent = (
                f"--dashboard-agent-listen-port={_free_port()}"  # its default can be had once on a machine
            )
            command = [*RAY, "start", *arguments, agent, "--block", "--disable-usage-stats"]
            self.nodes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=self.environment, start_new_session=True
                )
            )

    def _said(self, number: int) -> str:
        return (self.folder / f"node_{number}.log").read_text(encoding="utf-8", errors="replace")

    def _found(self, pattern: str) -> str:
        self._wait(
            lambda: re.search(pattern, self._said(0)) is not None and "Ray runtime started" in self._said(0),
            "the head did not start",
        )
        match = re.search(pattern, self._said(0))
        assert match
        return match[1]

    def _wait(self, ready: object, otherwise: str) -> None:
        deadline = time.monotonic() + 90
        while not ready():  # pyright: ignore[reportCallIssue]
            assert time.monotonic() < deadline, f"{otherwise}:\n{self._said(len(self.nodes) - 1)}"
            time.sleep(0.1)


def _of_session(leader: int) -> list[int]:
    """Processes of a session: those that a raylet started have groups of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def cluster(cpus: int, gpus: int = 0, dashboard: bool = False) -> Iterator[Cluster]:
    made = Cluster(cpus, gpus, dashboard)
    try:
        yield made
    finally:
        made.close()
