"""Tests of a folder server that is killed, or fails, in the middle of an append to the driver's files."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.record.files.events import Event, EventLog, encode_event, read_events
from orchestrator.record.files.tail import Follower
from orchestrator.runtime import folder_link
from orchestrator.runtime.folder_link import FolderLink
from orchestrator.runtime.folder_server import Change, FolderServer, Link

EVENTS = "events.jsonl"


def lines_of(*steps: int) -> bytes:
    """Return the events of steps. The time of each is its own, as in a run."""
    events = [{"event": "step", "time": 1000.0 + step, "step": step} for step in steps]
    return "".join(f"{encode_event(event)}\n" for event in events).encode()


def steps_in(folder: Path) -> list[int]:
    return [event["step"] for event in read_events(folder / EVENTS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "driver").mkdir()
    return tmp_path / "driver"


def killed_in_append(folder: Path, change: Change, num_bytes: int) -> tuple[FolderServer, int]:
    """Return a server that was restarted after it had appended so many bytes, and the worker's number."""
    server = FolderServer(folder, ())
    writer, _ = server.open(is_main=True)
    server.exchange(writer, [Change(change.name, lines_of(1, 2), append=True, number=1)], ())
    with (folder / change.name).open("ab") as file:
        file.write(change.data[:num_bytes])
    return FolderServer(folder, ()), writer


def test_an_append_that_is_sent_again_completes_the_torn_one(folder: Path) -> None:
    change = Change(EVENTS, lines_of(3, 4, 5), append=True, number=2)
    for num_bytes in range(len(change.data) + 1):
        server, writer = killed_in_append(folder, change, num_bytes)
        server.exchange(writer, [change], ())
        assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4, 5), num_bytes
        (folder / EVENTS).unlink()


def test_the_next_main_worker_begins_on_a_new_line(folder: Path) -> None:
    change = Change(EVENTS, lines_of(3), append=True, number=2)
    server, _ = killed_in_append(folder, change, len(change.data) // 2)
    assert steps_in(folder) == [1, 2]
    writer, _ = server.open(is_main=True)
    server.exchange(writer, [Change(EVENTS, lines_of(3, 4), append=True, number=1)], ())
    assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4)


def test_readers_of_a_growing_record_see_each_event_once(folder: Path) -> None:
    seen: list[Event] = []
    (folder / EVENTS).touch()
    follower = Follower(folder / EVENTS, [seen.append])
    change = Change(EVENTS, lines_of(3, 4), append=True, number=2)
    server, writer = killed_in_append(folder, change, len(lines_of(3)) - 9)
    follower.poll()
    assert [event["step"] for event in seen] == [1, 2]
    server.exchange(writer, [change], ())
    follower.close()
    assert [event["step"] for event in seen] == [1, 2, 3, 4]


def test_a_log_with_equal_lines_keeps_them_all(folder: Path) -> None:
    server = FolderServer(folder, ())
    writer, _ = server.open(is_main=False)
    server.exchange(writer, [Change("worker_1.log", b"waiting\n", append=True, number=1)], ())
    restarted = FolderServer(folder, ())
    restarted.exchange(writer, [Change("worker_1.log", b"waiting\nready\n", append=True, number=2)], ())
    assert (folder / "worker_1.log").read_text() == "waiting\nwaiting\nready\n"


class FullDisk:
    """Writes the first bytes of an append, and then has no space left."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[:9])
        self._file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", [EVENTS, "worker_0.log"])
def test_an_append_that_failed_on_a_full_disk_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = FolderServer(folder, ())
    writer, _ = server.open(is_main=True)
    server.exchange(writer, [Change(name, lines_of(1), append=True, number=1)], ())
    change = Change(name, lines_of(2), append=True, number=2)
    open_file = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *mode: FullDisk(open_file(path, *mode)))
        with pytest.raises(OSError, match="No space left"):
            server.exchange(writer, [change], ())
    server.exchange(writer, [change], ())
    assert (folder / name).read_bytes() == lines_of(1, 2)


def test_a_disk_that_is_full_after_a_restart_repeats_no_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Change(EVENTS, lines_of(3, 4), append=True, number=2)
    server, writer = killed_in_append(folder, change, len(lines_of(3)))
    open_file = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "open",
            lambda path, mode, **_: (
                FullDisk(open_file(path, mode)) if mode == "ab" else open_file(path, mode)
            ),
        )
        with pytest.raises(OSError, match="No space left"):
            server.exchange(writer, [change], ())
    server.exchange(writer, [change], ())
    assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4)


def test_long_events_are_sent_in_pieces_of_whole_lines(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_MAX_PIECE_BYTES", 150)
    monkeypatch.setattr(folder_link, "ray", SimpleNamespace(get=lambda reply, timeout=None: reply))
    server = FolderServer(folder, ())
    pieces: list[bytes] = []

    def exchange(writer: int, changes: list[Change], wanted: list[str]) -> dict[str, bytes]:
        pieces.extend(change.data for change in changes)
        return server.exchange(writer, changes, wanted)

    handle = SimpleNamespace(
        open=SimpleNamespace(remote=server.open), exchange=SimpleNamespace(remote=exchange)
    )
    run_dir = tmp_path / "worker"
    with FolderLink(Link("memory://run", handle), run_dir, rank=0):
        log = EventLog(run_dir / EVENTS)
        log.write_all({"event": "step", "time": 1.0, "step": step} for step in range(1, 21))
        log.write("notice", message="long " * 100)
        log.write("step", step=21)
        log.close()
    assert (folder / EVENTS).read_bytes() == b"".join(pieces)
    assert (folder / EVENTS).read_bytes().count(b"\n") == 22
    assert len(pieces) > 5
    assert all(piece.endswith(b"\n") for piece in pieces)
