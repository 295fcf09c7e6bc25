"""Key-value stores at which the workers of a process group rendezvous."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore


def tcp_store(address: str, port: int, size: int, is_main: bool, timeout_s: float) -> Store:
    """Return the store of workers on any nodes; the main worker serves it."""
    return TCPStore(address, port, size, is_main, timedelta(seconds=timeout_s), wait_for_workers=False)


def open_store(address: str) -> tuple[Store, tuple[str, int]]:
    """Serve a store for other processes on a free port; return it with its address and port."""
    store = TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    return store, (address, store.port)


def file_store(path: str, size: int) -> Store:
    """Return the store of workers on one machine; it takes no port."""
    return FileStore(path, size)
