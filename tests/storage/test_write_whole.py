"""Tests of atomic writing."""

import pytest

from orchestrator.storage.local_files import write_whole


def test_text_and_bytes_replace_the_old_file(tmp_path):
    path = tmp_path / "new" / "file"
    assert write_whole(path, "ä").read_bytes() == "ä".encode()
    assert write_whole(path, b"\x00").read_bytes() == b"\x00"
    assert [item.name for item in path.parent.iterdir()] == ["file"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial_one(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "file", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_lone_surrogate_does_not_stop_the_page(tmp_path):
    assert write_whole(tmp_path / "file", "a\ud800b").read_text() == "a?b"
