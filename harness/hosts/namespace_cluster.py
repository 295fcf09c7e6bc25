"""A Ray cluster whose nodes have addresses, process ids and clocks of their own, and runs on it."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.hosts.cluster import RAY, write_token
from harness.hosts.namespaces import LinkSpec, Mount, Network, Node, network
from harness.storage.object_server import BUCKET, PROGRAM, ObjectServer

ROOT = Path(__file__).resolve().parents[2]
_SHIFTED_CLOCK = Path(__file__).parent / "shifted_clock"
_START_SECONDS = 180
_PORT = 6379
_S3_PORT = 5000


class NamespaceCluster:
    """Nodes with a raylet each; the first is the head. All see ``shared`` at the path ``mount``."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self.folder = folder
        self.mount = folder / "mount"
        self.address = f"10.77.0.1:{_PORT}"
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_SHIFTED_CLOCK), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(write_token(folder)),
        }

    @property
    def nodes(self) -> list[Node]:
        return self._network.nodes

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def add_node(self, cpus: int = 1) -> Node:
        """Add a node with a raylet."""
        node = self._network.add_node()
        is_head = node.number == 0
        role = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        arguments = [
            *(role if is_head else [f"--address={self.address}"]),
            f"--node-ip-address={node.address}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            "--object-store-memory=100000000",
            f"--temp-dir={self.folder / f'ray{node.number}'}",
            "--disable-usage-stats",
            "--block",
        ]
        log = self.folder / f"node_{node.number}.log"
        raylet = self._start(node, [*RAY, "start", *arguments], log, self.folder)
        started = "Ray runtime started"
        wait_until(lambda: started in _text(log) or raylet.poll() is not None, f"node {node.number}", log)
        assert raylet.poll() is None, _text(log)
        return node

    def _start(self, node: Node, command: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
        clock = self._clock_path(node)
        if not clock.exists():
            self.shift_clock(node, 0.0)
        return node.start(command, {**self.environment, "SHIFTED_CLOCK": str(clock)}, log, folder)

    def _clock_path(self, node: Node) -> Path:
        return self.folder / f"clock{node.number}"

    def shift_clock(self, node: Node, seconds: float) -> None:
        """Set how far the node's wall clock is ahead of the machine's, for its Python processes."""
        # Written in place: they have mapped the file.
        with self._clock_path(node).open("r+b" if self._clock_path(node).exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    def cut_link(self, node: Node) -> None:
        self._network.cut_link(node)

    def restore_link(self, node: Node) -> None:
        self._network.restore_link(node)

    def lose_node(self, node: Node) -> None:
        self._network.remove_node(node)

    def start_object_server(self) -> None:
        """Start an S3 server on the second node, once; runs and commands find it by their environment."""
        if "AWS_ENDPOINT_URL" in self.environment:
            return
        node = self.nodes[1]
        server = ObjectServer(f"http://{node.address}:{_S3_PORT}")
        self.environment = {**self.environment, **server.environment}
        log = self.folder / "s3.log"
        process = self._start(node, [*PROGRAM, "-H", node.address, "-p", str(_S3_PORT)], log, self.folder)
        load = "from harness.storage.object_server import *"
        create = f"{load}; {server!r}.client().create_bucket(Bucket={BUCKET!r})"

        def is_created() -> bool:
            assert process.poll() is None, _text(log)
            return self.call(self.head, [sys.executable, "-c", create], self.folder) == 0

        wait_until(is_created, "the object server", log)

    def call(self, node: Node, command: list[str], folder: Path) -> int:
        """Run a program on a node to its end. Return its exit code."""
        return self._start(node, command, self.folder / "calls.log", folder).wait()

    def start_run(self, run_dir: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a run on the head node, in the folder that the nodes share."""
        flags = ("--run-dir", run_dir, "--ray-address", self.address)
        command = [sys.executable, "-m", "orchestrator", "train", *arguments, *flags]
        return self._start(self.head, command, self.output_path(run_dir), self.mount)

    def output_path(self, run_dir: str) -> Path:
        return self.folder / f"{re.sub(r'[^a-z0-9]+', '-', run_dir)}.txt"

    def finish_run(self, process: subprocess.Popen[bytes], run_dir: str, timeout_s: float = 600) -> str:
        """Wait for the end of a run, which must succeed. Return its output."""
        log = self.output_path(run_dir)
        wait_until(lambda: process.poll() is not None, f"the end of {run_dir}", log, timeout_s)
        assert process.returncode == 0, _text(log)
        return _text(log)


@contextmanager
def namespace_cluster(nodes: int = 3, link: LinkSpec | None = None) -> Iterator[NamespaceCluster]:
    """Start a cluster of nodes with one CPU each; end and remove all of it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
    for name in ("shared", "mount"):
        (folder / name).mkdir()
    try:
        with network([Mount(folder / "shared", folder / "mount")], link) as opened:
            cluster = NamespaceCluster(opened, folder)
            for _ in range(nodes):
                cluster.add_node()
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(
    condition: Callable[[], bool], name: str, log: Path, timeout_s: float = _START_SECONDS
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{name} did not come within {timeout_s} s:\n{_text(log)}"
        time.sleep(0.1)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
