"""Tests of Parquet files: random access, row groups that are read when they are needed, and messages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from orchestrator.data.parquet import ParquetRows
from orchestrator.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(file: Path, first: int, count: int, group: int = 4) -> Path:
    numbers = list(range(first, first + count))
    table = pa.table({"number": numbers, "text": [f"row {number}" for number in numbers]})
    pq.write_table(table, file, row_group_size=group)
    return file


def test_rows_of_several_files_have_one_order(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 10)
    write(tmp_path / "b.parquet", 10, 7)
    rows = ParquetRows(tmp_path)
    assert len(rows) == 17
    assert [rows[index]["number"] for index in range(17)] == list(range(17))
    assert rows[13] == {"number": 13, "text": "row 13"}
    assert ParquetRows(f"file://{tmp_path}/*.parquet", columns=["text"])[16] == {"text": "row 16"}
    assert ParquetRows(tmp_path, transform=lambda row: row["number"] + 1)[3] == 4


def test_only_the_row_groups_of_the_samples_are_read(tmp_path: Path) -> None:
    rows = ParquetRows(write(tmp_path / "a.parquet", 0, 40), cached_groups=2)
    assert [rows[index]["number"] for index in (9, 8, 39, 10)] == [9, 8, 39, 10]
    assert list(rows._cache) == [9, 2]
    assert rows[0]["number"] == 0
    assert list(rows._cache) == [2, 0]
    copy = pickle.loads(pickle.dumps(rows))  # noqa: S301
    assert not copy._cache
    assert copy[39]["number"] == 39


def test_files_and_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 0, 3)
    with pytest.raises(UserError, match=r"a.parquet has no column label; it has number, text"):
        ParquetRows(file, columns=["text", "label"])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but nothing else")
    with pytest.raises(UserError, match=r"bad.parquet is not a Parquet file"):
        ParquetRows(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"there is no data file"):
        ParquetRows(tmp_path / "none.parquet")
    with pytest.raises(IndexError):
        ParquetRows(file)[3]
