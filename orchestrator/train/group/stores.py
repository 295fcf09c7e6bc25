"""Key-value stores at which the workers of a process group rendezvous and exchange values.

torch's store asks no one for a password. So it listens at one address alone, its keys begin with a prefix
that is drawn for the run, and each value carries a message authentication code (MAC): a value that no
process of the run wrote counts as missing. The prefix alone would not suffice: clients can list all keys."""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryFile
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

LOOPBACK = "127.0.0.1"
"""The address that no other machine reaches."""
_PIECE_CHARACTERS = 2**22
"""torch's store ends the connection of a client that sends more than 8 MiB in one value."""

_MAX_PIECES = 1024
"""A larger number of pieces was not written by ``put_value``."""
_OPEN_TIMEOUT_S = 60
_READ_TIMEOUT_S = 1
"""How long the process that serves a store may wait for a key that is deleted between two of its calls."""

_NO_HOST_NAME = b"The hostname of the client socket cannot be retrieved"


# --- values


def seal(text: str, key: str, secret: str) -> str:
    """Return a text with the MAC that shows that a holder of the secret wrote it under this key."""
    return f"{_mac(text, key, secret)} {text}"


def unseal(data: bytes, key: str, secret: str) -> str | None:
    """Return the text of ``seal``; None if anyone else wrote it, or wrote it under another key."""
    mac, _, text = data.decode(errors="replace").partition(" ")
    is_ours = hmac.compare_digest(mac.encode(), _mac(text, key, secret).encode())
    return text if is_ours else None


def _mac(text: str, key: str, secret: str) -> str:
    # The length of the key keeps the end of a key apart from the beginning of a text.
    message = f"{len(key)} {key} {text}"
    return hmac.digest(secret.encode(), message.encode(), "sha256").hex()


def put_value(store: Store, key: str, value: Any, secret: str = "") -> list[str]:
    """Store a plain value of any size, in pieces. Return the keys of the pieces; the first is ``key``.

    ``key`` is written last: where it exists, all pieces do."""
    text = seal(json.dumps(value), key, secret)
    pieces = [text[begin : begin + _PIECE_CHARACTERS] for begin in range(0, len(text), _PIECE_CHARACTERS)]
    keys = _piece_keys(key, len(pieces))
    for piece_key, piece in zip(keys[1:], pieces[1:], strict=True):
        store.set(piece_key, piece)
    store.set(key, f"{len(pieces)} {pieces[0]}")
    return keys


def find_value(store: Store, key: str, secret: str = "") -> tuple[Any, list[str]] | None:
    """Return a value of ``put_value`` and the keys of its pieces; None if there is none.

    A value that no holder of the secret wrote counts as missing: the right one may still come."""
    if not store.check([key]):
        return None
    num_pieces, _, first = store.get(key).partition(b" ")
    if not (num_pieces.isdigit() and len(num_pieces) <= 4 and 1 <= int(num_pieces) <= _MAX_PIECES):
        return None
    keys = _piece_keys(key, int(num_pieces))
    if not store.check(keys):
        return None
    text = unseal(b"".join([first, *map(store.get, keys[1:])]), key, secret)
    return (json.loads(text), keys) if text is not None else None


def _piece_keys(key: str, num_pieces: int) -> list[str]:
    return [key, *(f"{key}/piece{number}" for number in range(1, num_pieces))]


# --- stores


def tcp_store(address: str, port: int, is_main: bool, timeout_s: float, secret: str) -> Store:
    """Return the store of workers on any nodes; the main worker serves it."""
    if is_main:
        store = _serve(address, port, timeout_s)
    else:
        store = TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    return PrefixStore(_prefix(secret), store)


def open_store(address: str, secret: str) -> tuple[Store, tuple[str, int]]:
    """Serve a store for other processes on a free port; return it with its address and port."""
    with _without_host_name_warnings():
        store = _serve(address, 0, _OPEN_TIMEOUT_S)
    store.set_timeout(timedelta(seconds=_READ_TIMEOUT_S))
    return PrefixStore(_prefix(secret), store), (address, store.port)


def _serve(address: str, port: int, timeout_s: float) -> TCPStore:
    """Serve a store at one address; port 0 is a free one."""
    listening = _listen(address, port)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening)


def _listen(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens at one address of this machine.

    torch's store would listen at all of them."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(target)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # Nodes behind network address translation are known by an address that they do not have.
        server.bind(("", port))
    server.listen()
    return server.detach()


def _prefix(secret: str) -> str:
    """Return the prefix of a run's keys. Clients can list them, so it does not tell the secret."""
    return _mac("prefix", "", secret)[:32]


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
