"""Values that workers leave each other in torch's store, of any size."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from contextlib import nullcontext
from typing import Any

import pytest

from orchestrator.train.group import stores
from orchestrator.train.group.stores import find_value, open_store, put_value, seal, tcp_store

SECRET = "a secret"


@pytest.mark.parametrize("value", [None, 0, "", "é", {"a": [1, 2.5]}, [7] * 5, "x" * 9])
@pytest.mark.parametrize("piece", [1, 4, 11, 1000])
def test_a_value_comes_back_from_its_pieces(monkeypatch: pytest.MonkeyPatch, piece: int, value: Any) -> None:
    monkeypatch.setattr(stores, "_PIECE_CHARACTERS", piece)
    store, _ = open_store("127.0.0.1", SECRET)
    keys = put_value(store, "report", value, SECRET)
    assert find_value(store, "report", SECRET) == (value, keys)
    assert keys[0] == "report"
    assert store.check(keys)
    assert len(keys) == -(-len(seal(json.dumps(value), "report", SECRET)) // piece)


@pytest.mark.parametrize("fails", [False, True])
def test_of_torchs_output_only_warnings_of_missing_host_names_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    """Also when no store could be opened. Afterwards the screen is as before."""

    class TalkingStore(stores.TCPStore):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            os.write(2, b"one\n[c10d] The hostname of the client socket cannot be retrieved. err=-3\ntwo\n")
            if fails:
                raise RuntimeError("no port")
            super().__init__(*arguments, **named)

    monkeypatch.setattr(stores, "TCPStore", TalkingStore)
    with pytest.raises(RuntimeError, match="no port") if fails else nullcontext():
        open_store("127.0.0.1", SECRET)
    os.write(2, b"three")
    assert capfd.readouterr().err.splitlines() == ["one", "two", "three"]


def test_a_value_larger_than_torch_accepts_in_one_piece_keeps_the_connection() -> None:
    """Over 8 MiB the store ends the connection of the client, which the group of the host uses too."""
    store, (address, port) = open_store("127.0.0.1", SECRET)
    client = tcp_store(address, port, False, 30, SECRET)
    report = {"files": {"experts": [[2**23, "0" * 64]] * 150_000}}
    keys = put_value(client, "report", report, SECRET)
    assert find_value(client, "report", SECRET) == (report, keys)
    for key in keys:
        client.delete_key(key)
    assert not client.check(["report"])
    assert store.num_keys() <= 1, "no piece is left; torch keeps a key of its own"


def test_a_store_listens_at_the_given_address_alone() -> None:
    """Its port is free at other addresses of the machine."""
    store, (_, port) = open_store("127.0.0.1", SECRET)
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
    with socket.socket() as same, pytest.raises(OSError, match="in use"):
        same.bind(("127.0.0.1", port))
    assert not store.check(["key"])


def test_the_main_worker_serves_its_store_at_the_given_address_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = tcp_store("127.0.0.1", port, True, 30, SECRET)
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
    tcp_store("127.0.0.1", port, False, 30, SECRET).set("key", "text")
    assert store.get("key") == b"text"


def test_a_node_behind_address_translation_serves_its_store_at_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is known by an address that none of its interfaces has."""
    bound: list[Any] = []

    class Behind(socket.socket):
        def bind(self, address: Any) -> None:
            bound.append(address[0])
            if address[0] == "127.0.0.1":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(stores.socket, "socket", Behind)
    store, (address, port) = open_store("127.0.0.1", SECRET)
    assert bound == ["127.0.0.1", ""]
    tcp_store(address, port, False, 30, SECRET).set("key", "text")
    assert store.get("key") == b"text"


def test_runs_with_other_secrets_do_not_see_each_others_keys() -> None:
    store, (address, port) = open_store("127.0.0.1", SECRET)
    put_value(store, "report", 1, SECRET)
    assert not tcp_store(address, port, False, 30, "another").check(["report"])
    raw = stores.TCPStore(address, port, wait_for_workers=False)
    assert not raw.check(["report"])
    if hasattr(raw, "list_keys"):  # torch lists all keys, so the prefix must not tell the secret
        assert not any(SECRET in key for key in raw.list_keys())


def test_values_that_no_worker_of_the_run_wrote_count_as_missing() -> None:
    """Random bytes, numbers of pieces out of range, other secrets, other keys, changed bits."""
    store, _ = open_store("127.0.0.1", SECRET)
    generator = random.Random(0)
    text = seal(json.dumps({"a": 1}), "key", SECRET)
    hostile = [
        "",
        "x",
        "1",
        f"0 {text}",
        f"-1 {text}",
        f"2 {text}",
        f"9999999999999 {text}",
        f"١ {text}",
        '1 {"a": 1}',
        "1 " + "[" * 100_000,
        f"1 {seal(json.dumps(1), 'key', 'another')}",
        f"1 {seal(json.dumps(1), 'another key', SECRET)}",
    ]
    good = f"1 {text}".encode()
    changed = bytearray(good)
    values = [value.encode() for value in hostile]
    for _ in range(1000):
        changed = bytearray(good)
        changed[generator.randrange(2, len(good))] ^= 1 << generator.randrange(8)
        values += [bytes(changed), generator.randbytes(generator.randrange(300))]
    for value in values:
        # Bytes that are not UTF-8 reach the store of another client as they are.
        store.set("key", value)  # pyrefly: ignore[bad-argument-type]
        assert find_value(store, "key", SECRET) is None, value[:100]
    store.set("key", good.decode())
    assert find_value(store, "key", SECRET) == ({"a": 1}, ["key"])


def test_a_store_survives_clients_that_send_garbage_stall_or_leave() -> None:
    store, (address, port) = open_store("127.0.0.1", SECRET)
    generator = random.Random(0)
    hello = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")  # torch's greeting: then commands follow
    stalled = [socket.create_connection((address, port)) for _ in range(20)]
    for begin in [b"", hello] * 100:
        with socket.create_connection((address, port)) as client:
            client.sendall(begin + generator.randbytes(300))
    put_value(store, "report", 1, SECRET)
    assert find_value(store, "report", SECRET) == (1, ["report"])
    for client in stalled:
        client.close()
