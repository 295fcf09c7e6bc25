"""Tests of where rows come from: files of each kind, folders, patterns, addresses and data sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.lm.packed_samples import segments_of, write_rows
from harness.lm.tokenizers import chat_tokenizer
from orchestrator.data.documents.opening import find_row_files, open_documents
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.rows import BadRow, Row
from orchestrator.errors import UserError

OPTIONS = DocumentOptions(64)
ROWS = [{"text": f"number {number}"} for number in range(7)]


def found_rows(*entries: Path | str) -> list[Row | BadRow]:
    files = find_row_files([str(entry) for entry in entries], chat_tokenizer(), OPTIONS)
    return [row for file in files for row in file.rows()]


def values(*entries: Path | str) -> list[Any]:
    rows = found_rows(*entries)
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.value for row in rows if isinstance(row, Row)]


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file


def test_json_lines_parquet_and_lists_hold_the_same_rows(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "a.jsonl", ROWS)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    whole = tmp_path / "a.json"
    whole.write_text("\n" + json.dumps(ROWS, indent=1))
    columns = write_parquet(tmp_path / "a.parquet", ROWS)
    for file in (lines, packed, whole, columns, f"file://{lines}", f"file://{columns}"):
        assert values(file) == ROWS, file


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n\nparagraphs")
    (tmp_path / "a.md").write_text("# Title")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert values(tmp_path) == [{"text": "# Title"}, {"text": "two\n\nparagraphs"}, {"text": "packed"}]


def test_texts_beside_rows_in_a_folder_are_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", ROWS[:2])
    write_parquet(tmp_path / "c.parquet", ROWS[2:4])
    (tmp_path / "README.md").write_text("about the data")
    assert values(tmp_path) == ROWS[:4]
    assert values(f"file://{tmp_path}") == ROWS[:4]
    assert values(tmp_path / "*") == [{"text": "about the data"}, *ROWS[:4]]


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    [row] = found_rows(tmp_path / "a.txt")
    assert isinstance(row, BadRow)
    assert "a.txt is not text in UTF-8" in row.message


def test_the_sizes_of_rows_add_up_to_that_of_the_file(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "a.jsonl", ROWS)
    for path in (lines, write_parquet(tmp_path / "a.parquet", ROWS)):
        [file] = find_row_files([str(path)], chat_tokenizer(), OPTIONS)
        assert sum(row.size for row in file.rows()) == pytest.approx(file.size)
        assert file.size == path.stat().st_size


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_files_are_divided_after_each_eos(tmp_path: Path, name: str) -> None:
    tokenizer = chat_tokenizer()
    documents = [(7, 8, 9, 0), (11, 12, 0), (13, 14)]
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    file = tmp_path / name
    if name.endswith(".npy"):
        np.save(file, tokens.astype(np.int64))
    else:
        tokens.tofile(file)
    for entry in (str(file), f"file://{file}"):
        samples = open_documents([entry], tokenizer, OPTIONS, print)
        [sample] = segments_of(samples)
        assert sorted(segment.tokens for segment in sample) == sorted(documents)
        assert samples.counts.trained_tokens == 6


def test_token_files_of_the_wrong_type_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint32).tofile(file)
    with pytest.raises(UserError, match=r"seems to hold uint32; save it as \.npy"):
        found_rows(file)
    np.save(tmp_path / "tokens.npy", np.array([3, -1, 5]))
    with pytest.raises(UserError, match="a file of tokens holds -1"):
        open_documents([str(tmp_path / "tokens.npy")], chat_tokenizer(), OPTIONS, print)


def test_folders_of_save_to_disk_are_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "many"))
    assert values(tmp_path / "one") == ROWS
    assert values(tmp_path / "many") == ROWS
    assert values(f"{tmp_path / 'many'}:test") == ROWS[:1]
    with pytest.raises(UserError, match=r"has the splits train, test, not dev; write .*many:SPLIT"):
        values(f"{tmp_path / 'many'}:dev")


def test_a_changed_folder_of_save_to_disk_has_another_version(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    versions = []
    for rows in (ROWS, ROWS[:3]):
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
        [file] = find_row_files([str(tmp_path / "one")], chat_tokenizer(), OPTIONS)
        versions.append(file.version())
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    ("entry", "arguments", "split"),
    [
        ("squad", ("squad",), "train"),
        ("owner/name", ("owner/name",), "train"),
        ("owner/name:test", ("owner/name",), "test"),
        ("wikitext:wikitext-2-raw-v1:train", ("wikitext", "wikitext-2-raw-v1"), "train"),
    ],
)
def test_other_names_are_data_sets_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, entry: str, arguments: tuple[str, ...], split: str
) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[tuple[str, ...], str]] = []

    def load_dataset(*names: str, split: str) -> Any:
        asked.append((names, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values(entry) == ROWS
    assert asked == [(arguments, split)]


def test_a_data_set_that_cannot_be_loaded_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*names: str, split: str) -> Any:
        raise ConnectionError(f"Couldn't reach {names[0]!r} on the Hub ({split})")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"no file or folder owner/name.*Couldn't reach.*save_to_disk"):
        values("owner/name")


def test_entries_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no data; give files"):
        values()
    for entry in ("missing.jsonl", str(tmp_path / "missing"), str(tmp_path), "./owner", "missing/*.parquet"):
        with pytest.raises(
            UserError, match=r"there is no data file .* a folder of \.jsonl, \.ndjson, \.json, "
        ):
            values(entry)
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(
        UserError, match=r"rows\.csv is of no known kind; known endings: \.jsonl, .*\.npy \(or \.gz"
    ):
        values(tmp_path / "rows.csv")
