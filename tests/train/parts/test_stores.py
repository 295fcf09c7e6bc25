"""Values that workers leave each other in torch's store, of any size."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from orchestrator.train.parts import stores
from orchestrator.train.parts.stores import get_value, open_store, put_value, tcp_store


@pytest.mark.parametrize("value", [None, 0, "", "é", {"a": [1, 2.5]}, [7] * 5, "x" * 9])
@pytest.mark.parametrize("piece", [1, 4, 11, 1000])
def test_a_value_comes_back_from_its_pieces(monkeypatch: pytest.MonkeyPatch, piece: int, value: Any) -> None:
    monkeypatch.setattr(stores, "_PIECE_CHARACTERS", piece)
    store, _ = open_store("127.0.0.1")
    keys = put_value(store, "report", value)
    assert get_value(store, "report") == (value, keys)
    assert keys[0] == "report"
    assert store.check(keys)
    assert len(keys) == -(-len(json.dumps(value)) // piece)


def test_warnings_of_torch_do_not_reach_the_screen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as that of an address without a host name. Afterwards the screen is as before."""

    class WarningStore(stores.TCPStore):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            os.write(2, b"[c10d] The hostname of the client socket cannot be retrieved")
            super().__init__(*arguments, **named)

    monkeypatch.setattr(stores, "TCPStore", WarningStore)
    open_store("127.0.0.1")
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def test_a_value_larger_than_torch_accepts_in_one_piece_keeps_the_connection() -> None:
    """Over 8 MiB the store ends the connection of the client, which the group of the host uses too."""
    store, (address, port) = open_store("127.0.0.1")
    client = tcp_store(address, port, 1, False, 30)
    report = {"files": {"experts": [[2**23, "0" * 64]] * 150_000}}
    keys = put_value(client, "report", report)
    assert get_value(client, "report") == (report, keys)
    for key in keys:
        client.delete_key(key)
    assert not client.check(["report"])
    assert store.num_keys() <= 1, "no piece is left; torch keeps a key of its own"
