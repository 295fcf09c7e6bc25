"""Key-value stores at which the workers of a process group rendezvous and leave each other values."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryFile
from typing import Any

from torch._C._distributed_c10d import FileStore, Store, TCPStore

_PIECE_CHARACTERS = 2**22
"""torch's store ends the connection of a client that sends more than 8 MiB in one value."""

_NO_HOST_NAME = b"The hostname of the client socket cannot be retrieved"


def put_value(store: Store, key: str, value: Any) -> list[str]:
    """Store a plain value of any size, in pieces. Return the keys that they have; the first is ``key``.

    Where ``key`` is there, all of them are."""
    text = json.dumps(value)
    pieces = [text[begin : begin + _PIECE_CHARACTERS] for begin in range(0, len(text), _PIECE_CHARACTERS)]
    keys = _piece_keys(key, len(pieces))
    for piece_key, piece in zip(keys[1:], pieces[1:], strict=True):
        store.set(piece_key, piece)
    store.set(key, f"{len(pieces)} {pieces[0]}")
    return keys


def get_value(store: Store, key: str) -> tuple[Any, list[str]]:
    """Return a value of ``put_value``, and the keys of its pieces."""
    num_pieces, _, text = store.get(key).decode().partition(" ")
    keys = _piece_keys(key, int(num_pieces))
    text += "".join(store.get(piece_key).decode() for piece_key in keys[1:])
    return json.loads(text), keys


def _piece_keys(key: str, num_pieces: int) -> list[str]:
    return [key, *(f"{key}/piece{number}" for number in range(1, num_pieces))]


def tcp_store(address: str, port: int, size: int, is_main: bool, timeout_s: float) -> Store:
    """Return the store of workers on any nodes; the main worker serves it."""
    return TCPStore(address, port, size, is_main, timedelta(seconds=timeout_s), wait_for_workers=False)


def open_store(address: str) -> tuple[Store, tuple[str, int]]:
    """Serve a store for other processes on a free port; return it with its address and port."""
    with _without_host_name_warnings():
        store = TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    return store, (address, store.port)


@contextmanager
def _without_host_name_warnings() -> Iterator[None]:
    """Hide torch's warnings about addresses without a host name; all other output is shown at the end."""
    sys.stderr.flush()
    shown = os.dup(2)
    with TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            written.seek(0)
            for line in written:
                if _NO_HOST_NAME not in line:
                    os.write(2, line)


def file_store(path: str, size: int) -> Store:
    """Return the store of workers on one machine; it takes no port."""
    return FileStore(path, size)
