"""Nodes on one machine: each with namespaces of its own, on a network of veth pairs and a bridge.

A node has its own address, process ids, host name, shared memory, monotonic clock and view of the file
system. The bridge is in a namespace too, so that the machine's own interfaces are never touched. Names
hold the id of the process that made them. Removing a node kills all of its processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from harness.hosts.delayed_switch import DelayedSwitch

_NEEDED = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "bash")
_PREFIX = "orchestrator"
_NUMBERS = count()
_START_SECONDS = 30
_MONOTONIC_OFFSET_S = 100_000
"""How far apart the monotonic clocks of the nodes are: those of real machines count from their start."""


def reason_not_allowed() -> str | None:
    """Return why namespaces cannot be made here; None if they can."""
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}, not installed here"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--time", "--fork", "true"],
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        return f"namespaces are not allowed here: {probe.stderr.strip()}"
    return None


@dataclass(frozen=True)
class LinkSpec:
    """The bandwidth of every node's link, in both directions, and the delay from node to node."""

    mbit_s: int
    delay_s: float = 0.0

    def shaping(self) -> list[str]:
        """Return the arguments of ``tc`` for the bandwidth."""
        # A burst of 2 ms, so that timers of the kernel do not limit the rate.
        burst_bytes = max(64_000, self.mbit_s * 1_000_000 // 8 // 500)
        return shlex.split(f"tbf rate {self.mbit_s}mbit burst {burst_bytes} latency 100ms")


@dataclass
class Node:
    """A node of the network."""

    number: int
    address: str
    init: subprocess.Popen[bytes]
    pid: int
    """The node's first process; all others of the node end with it."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs another one in the node."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--time")
        return ["nsenter", "--target", str(self.pid), *spaces, "--wdns=/", *arguments]

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program in the node, in a folder as the node sees it."""
        script = f"cd {shlex.quote(str(folder))} && exec {shlex.join(arguments)}"
        with output.open("ab") as log:
            process = subprocess.Popen(
                self.command(["bash", "-c", script]), stdout=log, stderr=log, env=dict(environment)
            )
        self.started.append(process)
        return process

    def call(self, *arguments: str) -> str:
        """Run a short program in the node. Return its output."""
        return _call(*self.command(arguments))

    def processes(self) -> list[int]:
        """Return the machine's ids of the node's processes."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == namespace:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End the node: the kernel kills all of its processes with the first one."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.communicate()
        for process in self.started:
            process.wait()


@dataclass(frozen=True)
class Mount:
    """A folder of the machine, and the path where nodes see it."""

    folder: Path
    path: Path


class Network:
    """A switch and its nodes, numbered from 0."""

    def __init__(self, mounts: Sequence[Mount] = (), link: LinkSpec | None = None) -> None:
        self._switch = _new_name()
        self._mounts = tuple(mounts)
        self._link = link
        self._delayed: DelayedSwitch | None = None
        self.nodes: list[Node] = []
        self._num_added = 0
        self._namespaces: list[str] = []

    def open(self) -> None:
        _remove_abandoned()
        if self._link is not None and self._link.delay_s:
            self._delayed = DelayedSwitch(self._link.mbit_s, self._link.delay_s)
            return
        self._add_namespace(self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")

    def add_node(self) -> Node:
        """Add a node, with a link to the switch."""
        number = self._num_added
        self._num_added += 1
        name = _new_name()
        address = f"10.77.0.{number + 1}"
        self._add_namespace(name)
        if self._delayed is not None:
            self._delayed.add_port(name, address)
        else:
            self._connect(name, _port(number))
        _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _call("ip", "-n", name, "link", "set", interface, "up")
        init = self._start_init(name, number)
        node = Node(number, address, init, _only_child(init))
        self.nodes.append(node)
        return node

    def _connect(self, name: str, port: str) -> None:
        on_switch = ("ip", "-n", self._switch, "link")
        _call(*on_switch, "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call(*on_switch, "set", port, "master", "bridge", "up")
        if self._link is not None:
            for namespace, interface in ((name, "eth0"), (self._switch, port)):
                shaping = ("qdisc", "add", "dev", interface, "root", *self._link.shaping())
                _call("ip", "netns", "exec", namespace, "tc", *shaping)

    def cut_link(self, node: Node) -> None:
        """Pull a node's cable: nothing reaches it, and it reaches nothing."""
        _call("ip", "-n", self._switch, "link", "set", _port(node.number), "down")

    def restore_link(self, node: Node) -> None:
        _call("ip", "-n", self._switch, "link", "set", _port(node.number), "up")

    def remove_node(self, node: Node) -> None:
        """End a node for good, with all of its processes."""
        self.nodes.remove(node)
        node.kill()

    def _start_init(self, name: str, number: int) -> subprocess.Popen[bytes]:
        """Start the first process of a node, which makes its other namespaces and adopts orphans."""
        mounts = [
            f"mount --bind {shlex.quote(str(m.folder))} {shlex.quote(str(m.path))}" for m in self._mounts
        ]
        ready = _call("mktemp", "-d").strip()
        steps = ["mount -t tmpfs tmpfs /dev/shm", f"hostname node{number}", *mounts, f"rmdir {ready}"]
        script = f"{' && '.join(steps)} && {{ sleep infinity & wait; }}"
        spaces = shlex.split("--mount --uts --ipc --pid --fork --kill-child --mount-proc --time")
        clock = f"--monotonic={number * _MONOTONIC_OFFSET_S}"
        # Killed with this process: no node outlives a test that was killed.
        command = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", name, "unshare", *spaces, clock]
        init = subprocess.Popen([*command, "bash", "-c", script], stderr=subprocess.PIPE)
        deadline = time.monotonic() + _START_SECONDS
        while Path(ready).exists():
            assert init.poll() is None, f"node {number} ended as it started: {init.communicate()[1]}"
            assert time.monotonic() < deadline, f"node {number} did not start within {_START_SECONDS} s"
            time.sleep(0.02)
        return init

    def _add_namespace(self, name: str) -> None:
        _call("ip", "netns", "add", name)
        self._namespaces.append(name)

    def close(self) -> None:
        """Remove all nodes, links and namespaces."""
        for node in tuple(self.nodes):
            self.remove_node(node)
        if self._delayed is not None:
            self._delayed.close()
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def network(mounts: Sequence[Mount] = (), link: LinkSpec | None = None) -> Iterator[Network]:
    """Provide a network without nodes; whatever happens, nothing of it is left behind."""
    opened = Network(mounts, link)
    try:
        opened.open()
        yield opened
    finally:
        opened.close()


def _new_name() -> str:
    """Return the name of a namespace, unique on this machine."""
    return f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"


def _remove_abandoned() -> None:
    """Remove the namespaces of processes that were killed before they could do so."""
    for line in _call("ip", "netns", "list").splitlines():
        match = re.match(rf"({_PREFIX}(\d+)-\w+)", line)
        if match and not Path(f"/proc/{match[2]}").exists():
            subprocess.run(["ip", "netns", "delete", match[1]], capture_output=True, check=False)


def _port(number: int) -> str:
    """Return the name of the switch's end of a node's link."""
    return f"port{number}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program of a node, if it still runs: it is the child of the process that entered the node."""
    if process.poll() is None:
        os.kill(_only_child(process), signal.SIGKILL)
        process.wait()


def _only_child(process: subprocess.Popen[bytes]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.strip()}"
    return done.stdout
