"""Tests of the tokenised data on disk: written once, shared, and written again when something changed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.lm.packed_samples import segments_of, write_rows
from harness.lm.tokenizers import CHATML, chat_tokenizer
from orchestrator.data.documents import reading
from orchestrator.data.documents.opening import open_divided, open_documents
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packed import PackedDocuments
from orchestrator.errors import UserError

ROWS = [{"text": f"This is number {number}. " * (number % 7 + 1)} for number in range(40)]


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: Any, on_call: Callable[[], None] = lambda: None) -> None:
        self.tokenizer = tokenizer
        self.on_call = on_call
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        self.on_call()
        return self.tokenizer(*arguments, **options)


def tokenises(file: Path, tokenizer: Any | None = None, **options: Any) -> bool:
    """Open a file; return whether it was tokenised."""
    counting = Counting(tokenizer or chat_tokenizer())
    open_it(file, counting, **options)
    return counting.calls > 0


def open_it(file: Path, tokenizer: Any, **options: Any) -> PackedDocuments:
    settings: dict[str, Any] = {"sequence_length": 32, **options}
    return open_documents([str(file)], tokenizer, DocumentOptions(**settings), lambda note: None)


def test_data_is_tokenised_once_whatever_the_samples(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    assert tokenises(file)
    assert not tokenises(file)
    assert not tokenises(file, sequence_length=77, packing=False, seed=5, vocabulary=1000)


def test_a_change_of_file_tokenizer_or_options_tokenises_again(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    assert tokenises(file)
    changes: list[tuple[Any, dict[str, Any]]] = [
        (chat_tokenizer(merges=50), {}),
        (chat_tokenizer(adds_bos=True), {}),
        (chat_tokenizer(template=CHATML), {}),
        (None, {"train_on": "all"}),
        (None, {"skip_bad": True}),
    ]
    for tokenizer, options in changes:
        assert tokenises(file, tokenizer, **options), options
        assert not tokenises(file, tokenizer, **options), options
    write_rows(file, ROWS[:-1])
    assert tokenises(file)
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert tokenises(file)


def test_calls_of_a_tokenizer_do_not_change_the_key(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenises(file, tokenizer)
    assert not tokenises(file)


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin", "trained.bin", "counts.json"])
def test_files_that_were_cut_are_written_again(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    whole = segments_of(open_it(file, chat_tokenizer()))
    [damaged] = (tmp_path / "home").rglob(name)
    os.truncate(damaged, damaged.stat().st_size - 1)
    assert tokenises(file)
    assert segments_of(open_it(file, chat_tokenizer())) == whole


def test_a_writer_that_failed_leaves_nothing_behind_that_others_read(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_it(file, Counting(chat_tokenizer(), fail))
    assert list((tmp_path / "home").rglob("tokens.bin"))
    samples = open_it(file, chat_tokenizer())
    assert samples.counts.documents == len(ROWS)
    assert not list((tmp_path / "home").rglob("*.part"))


def test_of_several_that_open_at_once_one_writes_and_the_others_wait(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    waiting = threading.Semaphore(0)
    others_wait = threading.Event()

    def hold() -> None:
        # The writer goes on only when all others stand at the lock.
        if all(waiting.acquire(timeout=30) for _ in range(3)):
            others_wait.set()

    def note(message: str) -> None:
        if message.startswith("waiting for another process"):
            waiting.release()

    tokenizers = [Counting(chat_tokenizer(), hold) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(open_documents, [str(file)], tokenizer, DocumentOptions(32), note)
            for tokenizer in tokenizers
        ]
        results = [segments_of(job.result()) for job in jobs]
    assert others_wait.is_set()
    assert sorted(tokenizer.calls for tokenizer in tokenizers) == [0, 0, 0, 1]
    assert results == [results[0]] * 4


def test_progress_tells_documents_and_the_share_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SECONDS_BETWEEN_NOTES", 0)
    monkeypatch.setattr(reading, "_ROWS_AT_ONCE", 10)
    file = write_rows(tmp_path / "a.jsonl", [{"text": "a"}] * 40)
    notes: list[str] = []
    open_documents([str(file)], chat_tokenizer(), DocumentOptions(32), notes.append)
    shares = [note.rpartition(", ")[2] for note in notes if note.startswith("tokenising: ")]
    assert shares == ["25% read", "50% read", "75% read", "100% read"]
    assert notes[1].startswith("tokenising: 20 documents, 40 tokens (")
    assert notes[-1] == "data: 40 documents, 80 tokens (40 trained) in 3 samples of 32, 16.7% padding"


def test_the_counts_are_those_of_the_divided_samples(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": "the"}) for _ in range(40)))
    notes: list[str] = []
    options = DocumentOptions(128)
    train, validation = open_divided([str(file)], chat_tokenizer(), options, notes.append, 1 / 4)
    assert (len(train), len(validation)) == (1, 1)
    assert notes[-1] == "data: 40 documents, 120 tokens (80 trained) in 2 samples of 128, 53.1% padding"
    assert len(open_documents([str(file)], chat_tokenizer(), options, notes.append)) == 1
    assert notes[-1].endswith("in 1 sample of 128, 6.2% padding")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write the tokenised data into .*No space left"):
        open_it(file, Counting(chat_tokenizer(), fail))
