"""Tests of JSONL sources: order, places, and messages about files and lines."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.cursor import CursorHooks, open_cursor
from orchestrator.data.json_lines import JsonLines
from orchestrator.errors import UserError


def write(path: Path, lines: list[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def numbers(first: int, count: int) -> list[str]:
    return [json.dumps({"number": number}) for number in range(first, first + count)]


def values(source: JsonLines, state: Any = None) -> list[int]:
    return [source.decode(item)["number"] for item in source.read(0, state).take(1000)]


def test_files_are_read_in_the_order_given_and_folders_by_name(tmp_path: Path) -> None:
    second = write(tmp_path / "b.jsonl", numbers(5, 3))
    write(tmp_path / "a.jsonl.gz", numbers(0, 5))
    (tmp_path / "notes.txt").write_text("not data")
    assert values(JsonLines(tmp_path)) == list(range(8))
    assert values(JsonLines(str(tmp_path / "*.jsonl*"))) == list(range(8))
    assert values(JsonLines([second, tmp_path / "a.jsonl.gz"])) == [5, 6, 7, 0, 1, 2, 3, 4]


def test_an_address_is_read_like_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", numbers(0, 3))
    write(tmp_path / "b.jsonl.gz", numbers(3, 3))
    address = f"file://{tmp_path}"
    assert values(JsonLines(address)) == list(range(6))
    assert values(JsonLines(f"{address}/*.jsonl")) == list(range(3))
    assert values(JsonLines(f"{address}/b.jsonl.gz")) == list(range(3, 6))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_state_leads_to_the_next_line(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, [*numbers(0, 3), "", "  ", *numbers(3, 2)])
    write(tmp_path / "b.jsonl", numbers(5, 2))
    source = JsonLines(tmp_path)
    reader = source.read(0)
    for position in range(8):
        state = json.loads(json.dumps(reader.state()))
        assert values(source, state) == list(range(position, 7))
        reader.take(1)


def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*numbers(0, 2), "", '{"number": 3', *numbers(4, 1)])
    source = JsonLines(file)
    items = source.read(0).take(10)
    assert source.decode(items[3])["number"] == 4
    with pytest.raises(UserError, match=rf"{file}, line 4 is not JSON .*number.*correct or remove"):
        source.decode(items[2])


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"number": "\xff\xfe"}\n')
    source = JsonLines(file)
    with pytest.raises(UserError, match="line 1 is not JSON"):
        source.decode(source.read(0).take(1)[0])


def test_files_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no data file .*none.jsonl"):
        JsonLines(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"folder of \.jsonl"):
        JsonLines(tmp_path)
    with pytest.raises(UserError, match="list of data files is empty"):
        JsonLines([])
    with pytest.raises(UserError, match="not known here"):
        JsonLines("gopher://host/a.jsonl")
    if os.geteuid():
        locked = write(tmp_path / "locked.jsonl", numbers(0, 1))
        locked.chmod(0)
        with pytest.raises(UserError, match=r"cannot read the data file .*Permission denied"):
            JsonLines(locked)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", numbers(0, 5000))
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(UserError, match=rf"cannot read {file} after line \d+"):
        JsonLines(file).read(0).take(10_000)


@pytest.mark.parametrize(
    "state", [{}, {"file": 5, "offset": 0, "line": 0}, {"file": 0, "offset": -1, "line": 0}, {"file": "0"}]
)
def test_a_state_of_other_files_is_refused(tmp_path: Path, state: Any) -> None:
    source = JsonLines(write(tmp_path / "a.jsonl", numbers(0, 3)))
    with pytest.raises(UserError, match="resume with the files"):
        source.read(0, state or {"line": 1}).take(1)


def test_a_transform_makes_the_samples(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", numbers(0, 3))
    source = JsonLines(file, transform=lambda row: row["number"] * 2, collate=sum)
    assert [source.decode(item) for item in source.read(0).take(5)] == [0, 2, 4]
    assert source.collate([1, 2]) == 3


def test_moved_data_is_found_again_at_its_saved_place(tmp_path: Path) -> None:
    """The file has another name and another folder; a changed line is still refused."""
    old = write(tmp_path / "a.jsonl", numbers(0, 9))
    source = JsonLines(old)
    cursor = open_cursor(source, 0, 5, None, CursorHooks())
    place = cursor.place()
    (tmp_path / "elsewhere").mkdir()
    new = old.rename(tmp_path / "elsewhere" / "b.jsonl")
    moved = JsonLines(new)
    items = open_cursor(moved, 0, 5, place, CursorHooks()).take(100)
    assert [moved.decode(item)["number"] for item in items] == [5, 6, 7, 8]
    write(new, numbers(1, 9))
    with pytest.raises(UserError, match="sample 5 of the epoch is another one"):
        open_cursor(moved, 0, 5, place, CursorHooks())
