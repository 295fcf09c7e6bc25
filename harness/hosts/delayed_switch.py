"""Links with a bandwidth and a delay, for kernels without ``tc netem``.

A node's interface is a TUN device. A thread of this process reads its packets, and hands each to the node
that it is for: after the packets before it have left at the given rate, and after the delay. The kernel
passes on large segments as they are (TSO), so that a thread of Python carries gigabits; TCP still sees
packets of 1,500 bytes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TSO of IPv4 and IPv6
_CLONE_NEWNET = 0x40000000
_HEADER_BYTES = 10  # of a segment that the kernel is to divide
_TARGET_ADDRESS = slice(_HEADER_BYTES + 16, _HEADER_BYTES + 20)
_LARGEST_PACKET = 2**16 + _HEADER_BYTES
_QUEUE_SECONDS = 0.1
"""A packet that would wait longer to leave is dropped, as a switch drops it."""
_IDLE_SECONDS = 0.05


@dataclass
class _Port:
    """A node's end of its link, with the packets that are on their way to it."""

    file: int
    arriving: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0
    """When the last packet that the node has sent has left it."""


class DelayedSwitch:
    """Connects nodes by links with the same bandwidth and one-way delay."""

    def __init__(self, mbit_s: float, delay_s: float) -> None:
        self._bytes_per_s = mbit_s * 1e6 / 8
        self._delay_s = delay_s
        self._ports: dict[bytes, _Port] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self._thread.start()

    def add_port(self, namespace: str, address: str) -> None:
        """Create the interface ``eth0`` of a node, in its network namespace."""
        made: list[int] = []
        # A thread has a network namespace of its own, and keeps it until it ends.
        thread = threading.Thread(target=lambda: made.append(_make_tun(namespace)))
        thread.start()
        thread.join()
        key = bytes(int(part) for part in address.split("."))
        self._ports = {**self._ports, key: _Port(made[0])}

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for port in self._ports.values():
            os.close(port.file)

    def _forward(self) -> None:
        while not self._closed.is_set():
            ports = {port.file: port for port in self._ports.values()}
            now = time.monotonic()
            next_arrival = min(
                (port.arriving[0][0] for port in ports.values() if port.arriving), default=now + 1
            )
            wait_s = min(_IDLE_SECONDS, max(0.0, next_arrival - now))
            readable, _, _ = select.select(list(ports), (), (), wait_s)
            for file in readable:
                self._take(ports[file], time.monotonic())
            for port in ports.values():
                _deliver(port, time.monotonic())

    def _take(self, port: _Port, now: float) -> None:
        packet = os.read(port.file, _LARGEST_PACKET)
        target = self._ports.get(packet[_TARGET_ADDRESS])
        leaves_at = max(now, port.free_at) + len(packet) / self._bytes_per_s
        if target is not None and leaves_at - now <= _QUEUE_SECONDS:
            port.free_at = leaves_at
            target.arriving.append((leaves_at + self._delay_s, packet))


def _deliver(port: _Port, now: float) -> None:
    """Hand over the packets that have arrived. Packets of several nodes may arrive in another order."""
    while port.arriving and port.arriving[0][0] <= now:
        _, packet = port.arriving.popleft()
        os.write(port.file, packet)


def _make_tun(namespace: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOADS)
    return tun
