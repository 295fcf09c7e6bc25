"""Values that workers leave each other in torch's store, of any size."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
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
        open_store("127.0.0.1")
    os.write(2, b"three")
    assert capfd.readouterr().err.splitlines() == ["one", "two", "three"]


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
