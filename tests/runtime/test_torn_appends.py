"""Tests of a folder server that is killed, or fails, in the middle of an append to the driver's files."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.storage.folder_links import without_ray
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog, encode_event
from orchestrator.record.files.reading import read_events
from orchestrator.record.files.tail import Follower
from orchestrator.runtime import folder_link
from orchestrator.runtime.folder_link import FolderLink
from orchestrator.runtime.folder_server import DriverEnd, FileChange, FolderServer

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


def killed_in_append(folder: Path, change: FileChange, num_bytes: int) -> tuple[FolderServer, int]:
    """Return a server that was restarted after it had appended so many bytes, and the worker's number."""
    server = FolderServer(folder, ())
    writer = server.open(is_main=True).writer
    server.exchange(writer, 1, [FileChange(change.name, lines_of(1, 2), 0)])
    with (folder / change.name).open("ab") as file:
        file.write(change.data[:num_bytes])
    return FolderServer(folder, ()), writer


def test_an_append_that_is_sent_again_completes_the_torn_one(folder: Path) -> None:
    change = FileChange(EVENTS, lines_of(3, 4, 5), len(lines_of(1, 2)))
    for num_bytes in range(len(change.data) + 1):
        server, writer = killed_in_append(folder, change, num_bytes)
        server.exchange(writer, 2, [change])
        assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4, 5), num_bytes
        (folder / EVENTS).unlink()


def test_the_next_main_worker_begins_on_a_new_line(folder: Path) -> None:
    change = FileChange(EVENTS, lines_of(3), len(lines_of(1, 2)))
    server, _ = killed_in_append(folder, change, len(change.data) // 2)
    assert steps_in(folder) == [1, 2]
    opened = server.open(is_main=True)
    server.exchange(opened.writer, 1, [FileChange(EVENTS, lines_of(3, 4), opened.sizes[EVENTS])])
    assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4)


def test_readers_of_a_growing_record_see_each_event_once(folder: Path) -> None:
    seen: list[Any] = []
    (folder / EVENTS).touch()
    follower = Follower(folder / EVENTS, [seen.append])
    change = FileChange(EVENTS, lines_of(3, 4), len(lines_of(1, 2)))
    server, writer = killed_in_append(folder, change, len(lines_of(3)) - 9)
    follower.poll()
    assert [event.step for event in seen] == [1, 2]
    server.exchange(writer, 2, [change])
    follower.close()
    assert [event.step for event in seen] == [1, 2, 3, 4]


def test_a_log_with_equal_lines_keeps_them_all(folder: Path) -> None:
    server = FolderServer(folder, ())
    writer = server.open(is_main=False).writer
    sizes, _ = server.exchange(writer, 1, [FileChange("worker_1.log", b"waiting\n", 0)])
    again = FileChange("worker_1.log", b"waiting\nready\n", sizes["worker_1.log"])
    for _ in range(2):
        restarted = FolderServer(folder, ())
        restarted.exchange(writer, 2, [again])
        assert (folder / "worker_1.log").read_text() == "waiting\nwaiting\nready\n"


def test_two_workers_that_write_one_log_lose_no_line(folder: Path) -> None:
    """A host that leaves a group sends its last lines while another one has its rank already."""
    server = FolderServer(folder, ())
    old, new = (server.open(is_main=False).writer for _ in range(2))
    server.exchange(old, 1, [FileChange("worker_1.log", b"begun\n", 0)])
    server.exchange(new, 1, [FileChange("worker_1.log", b"joined\n", 0)])
    sizes, _ = server.exchange(old, 2, [FileChange("worker_1.log", b"left\n", 6)])
    assert sizes == {"worker_1.log": 18}
    assert (folder / "worker_1.log").read_text() == "begun\njoined\nleft\n"


class FullDisk:
    """Writes the first bytes of an append, and then has no space left."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, *position: int) -> int:
        return self._file.seek(*position)

    def read(self) -> bytes:
        return self._file.read()

    def write(self, data: bytes) -> None:
        self._file.write(data[:9])
        self._file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", [EVENTS, "worker_0.log"])
def test_an_append_that_failed_on_a_full_disk_is_completed_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = FolderServer(folder, ())
    writer = server.open(is_main=True).writer
    server.exchange(writer, 1, [FileChange(name, lines_of(1), 0)])
    change = FileChange(name, lines_of(2), len(lines_of(1)))
    open_file = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *mode: FullDisk(open_file(path, *mode)))
        with pytest.raises(OSError, match="No space left"):
            server.exchange(writer, 2, [change])
    server.exchange(writer, 2, [change])
    assert (folder / name).read_bytes() == lines_of(1, 2)


def test_a_disk_that_is_full_after_a_restart_repeats_no_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = FileChange(EVENTS, lines_of(3, 4), len(lines_of(1, 2)))
    server, writer = killed_in_append(folder, change, len(lines_of(3)))
    open_file = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "open",
            lambda path, mode, **_: (
                FullDisk(open_file(path, mode)) if mode == "a+b" else open_file(path, mode)
            ),
        )
        with pytest.raises(OSError, match="No space left"):
            server.exchange(writer, 2, [change])
    server.exchange(writer, 2, [change])
    assert (folder / EVENTS).read_bytes() == lines_of(1, 2, 3, 4)


def test_long_events_are_sent_in_pieces(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_MAX_PIECE_BYTES", 150)
    monkeypatch.setattr(folder_link, "ray", without_ray())
    server = FolderServer(folder, ())
    pieces: list[bytes] = []

    def exchange(
        writer: int, call: int, changes: list[FileChange]
    ) -> tuple[dict[str, int], dict[str, bytes]]:
        pieces.extend(change.data for change in changes)
        return server.exchange(writer, call, changes)

    handle = SimpleNamespace(
        open=SimpleNamespace(remote=server.open), exchange=SimpleNamespace(remote=exchange)
    )
    run_dir = tmp_path / "worker"
    with FolderLink(DriverEnd("memory://run", handle), run_dir, rank=0):
        log = EventLog(run_dir / EVENTS)
        log.write(*(kinds.Step(time=1.0, step=step) for step in range(1, 21)))
        log.write(kinds.Notice(message="long " * 100))
        log.write(kinds.Step(step=21))
        log.close()
    assert (folder / EVENTS).read_bytes() == b"".join(pieces)
    assert (folder / EVENTS).read_bytes().count(b"\n") == 22
    assert len(pieces) > 5
