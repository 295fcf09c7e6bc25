"""Tests of reading rows: texts and completions against tokenising one by one, and bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.lm.packed_samples import Segment, open_rows, segments_of, write_rows
from harness.lm.tokenizers import BOS, EOS, chat_tokenizer
from orchestrator.data.documents.opening import open_documents
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.errors import UserError

EOS_ID = 0
BOS_ID = 1


def documents(file: Path, rows: list[Any], tokenizer: Any, **options: Any) -> list[Segment]:
    """Return the documents of rows, one in a sample, in the order of their tokens."""
    samples = open_rows(file, rows, tokenizer, sequence_length=128, packing=False, **options)
    return sorted((segment for [segment] in segments_of(samples)), key=lambda segment: segment.tokens)


words = st.text(st.sampled_from("ab 1.é🙂\n"), min_size=1, max_size=20)


@pytest.mark.parametrize("adds_bos", [False, True])
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(words.filter(str.strip), min_size=1, max_size=5))
def test_texts_are_tokenised_as_one_by_one_and_end_with_eos(
    tmp_path_factory: pytest.TempPathFactory, adds_bos: bool, texts: list[str]
) -> None:
    tokenizer = chat_tokenizer(adds_bos=adds_bos)
    rows = [{"text": text} for text in texts]
    found = documents(tmp_path_factory.mktemp("texts") / "a.jsonl", rows, tokenizer)
    assert [segment.tokens for segment in found] == sorted(
        (*tokenizer(text)["input_ids"], EOS_ID) for text in texts
    )
    for segment in found:
        assert segment.labels == (*segment.tokens[1:], -100)
        assert segment.tokens.count(BOS_ID) == adds_bos


@settings(max_examples=50, deadline=None)
@given(prompt=words, completion=words.filter(str.strip), adds_bos=st.booleans())
def test_a_prompt_has_its_own_tokens_and_the_completion_is_trained(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, completion: str, adds_bos: bool
) -> None:
    tokenizer = chat_tokenizer(adds_bos=adds_bos)
    rows = [{"prompt": prompt, "completion": completion}]
    [segment] = documents(tmp_path_factory.mktemp("prompts") / "a.jsonl", rows, tokenizer)
    given = tuple(tokenizer(prompt)["input_ids"])
    assert segment.tokens[: len(given)] == given
    assert segment.tokens[-1] == EOS_ID
    assert segment.tokens.count(EOS_ID) == 1
    assert segment.tokens.count(BOS_ID) == adds_bos
    assert tokenizer.decode(segment.tokens, skip_special_tokens=True) == prompt + completion
    labels = [label for _, label in segment.labelled()]
    assert labels == list(segment.tokens[len(given) :])
    assert tokenizer.decode(labels) == completion + EOS


def test_special_tokens_that_a_text_has_itself_are_not_doubled(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(adds_bos=True)
    [text] = documents(tmp_path / "a.jsonl", [{"text": f"{BOS}one{EOS}"}], tokenizer)
    assert tokenizer.decode(text.tokens) == f"{BOS}one{EOS}"
    rows = [{"prompt": f"{BOS}one", "completion": f" two{EOS}"}]
    [completion] = documents(tmp_path / "b.jsonl", rows, tokenizer)
    assert tokenizer.decode(completion.tokens) == f"{BOS}one two{EOS}"


def test_all_of_a_prompt_is_trained_on_request(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(adds_bos=True)
    rows = [{"prompt": "one", "completion": " two"}]
    [segment] = documents(tmp_path / "a.jsonl", rows, tokenizer, train_on="all")
    assert segment.labels == (*segment.tokens[1:], -100)


def test_only_answers_of_the_completion_are_trained(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    turns = [("user", "a?"), ("assistant", "A."), ("user", "b?"), ("assistant", "B.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": messages[:3], "completion": messages[3:]}]
    [segment] = documents(tmp_path / "a.jsonl", rows, tokenizer)
    assert list(segment.tokens) == tokenizer.apply_chat_template(messages)["input_ids"]
    assert tokenizer.decode([label for _, label in segment.labelled()]) == "B.<|im_end|>"


def test_another_column_of_text_is_read_on_request(tmp_path: Path) -> None:
    rows = [{"content": "one", "messages": [], "text": "two"}]
    [segment] = documents(tmp_path / "a.jsonl", rows, chat_tokenizer(), text_column="content")
    assert chat_tokenizer().decode(segment.tokens) == f"one{EOS}"


def test_chats_are_preferred_to_prompts_beside_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "A."}]
    rows = [{"prompt": "a?", "completion": "A.", "text": "?", "messages": messages}]
    [segment] = documents(tmp_path / "a.jsonl", rows, chat_tokenizer())
    assert chat_tokenizer().decode(segment.tokens).startswith("<|im_start|>user")


BAD_ROWS: list[tuple[Any, str]] = [
    ([1, 2], r"is \[1, 2\]; an object with columns was needed"),
    ({"label": 3, "id": 1}, "has the columns label, id; needed: text, messages"),
    (
        {"instruction": "a", "input": "", "output": "b"},
        "has .*; write instruction and input together as prompt, and output",
    ),
    ({"question": "a", "answer": "b"}, "has .*; write question as prompt, and answer as completion"),
    ({"prompt": "a", "response": "b"}, "has .*; write response as completion"),
    ({}, r"has the columns \(none\)"),
    ({"messages": None, "text": None}, "has the columns messages, text; needed"),
    ({"messages": "hello"}, 'has messages that are "hello"; a list of messages'),
    ({"messages": []}, r"has messages that are \[\]"),
    ({"messages": ["hello"]}, r'has messages\[0\], which is "hello"'),
    ({"messages": [{"content": "x"}]}, r"has messages\[0\] with the role null"),
    ({"messages": [{"role": "user", "content": 3}]}, r"has messages\[0\] with the content 3"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, r"has tools that are not JSON"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": "3"}, r"has tools that are 3; a list"),
    (
        {"conversations": [{"from": "bing", "value": "x"}]},
        r'has conversations\[0\] from "bing"; known: human',
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2 {message}.*--skip-bad"):
        open_rows(tmp_path / "a.jsonl", [good, row], chat_tokenizer())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 3}, "has text that is 3; a text was needed"),
        ({"prompt": "x", "completion": [{"role": "user"}]}, "two texts or two lists of messages"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"a\.jsonl, line 1 .*{message}"):
        open_rows(tmp_path / "a.jsonl", [row], chat_tokenizer())


def test_bad_rows_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"number {n}"} for n in range(6)])
    with file.open("a") as opened:
        opened.write('{"text": \n{"label": 1}\n[]\n{"text": 5}\n')
    notes: list[str] = []
    options = DocumentOptions(64, skip_bad=True)
    for _ in range(2):  # the second time from the cache
        notes.clear()
        counts = open_documents([str(file)], chat_tokenizer(), options, notes.append).counts
        assert (counts.documents, counts.bad_lines, counts.reading.rows) == (6, 4, 10)
        assert "data: 4 bad rows left out" in notes
        named = [note for note in notes if note.startswith("bad row: ")]
        assert [f"line {n}" in note for n, note in zip((7, 8, 9), named, strict=True)] == [True] * 3
    with pytest.raises(UserError, match=r"a\.jsonl, line 7 is not JSON"):
        open_documents([str(file)], chat_tokenizer(), DocumentOptions(64), notes.append)


def test_rows_of_several_kinds_are_refused_even_when_bad_ones_are_skipped(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(
        UserError, match=r"line 2 is a prompt and completion, but .*line 1 is a text; rows of one"
    ):
        open_rows(tmp_path / "a.jsonl", rows, chat_tokenizer(), skip_bad=True)


def test_rows_with_nothing_to_train_on_are_left_out_and_counted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "x"}
    chats = [
        [user],
        [user, {"role": "assistant", "content": "  "}],
        [user, {"role": "assistant", "content": None}, user, {"role": "assistant", "content": "y"}],
    ]
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats], chat_tokenizer())
    counts = samples.counts
    assert (counts.documents, counts.reading.nothing_to_train, counts.empty_answers) == (1, 2, 2)
    prompts = [{"prompt": "a", "completion": " "}, {"prompt": "", "completion": "b"}]
    counts = open_rows(tmp_path / "b.jsonl", prompts, chat_tokenizer()).counts
    assert (counts.documents, counts.reading.nothing_to_train, counts.empty_answers) == (1, 1, 1)
    counts = open_rows(tmp_path / "c.jsonl", [{"text": ""}, {"text": "b"}], chat_tokenizer()).counts
    assert (counts.documents, counts.reading.nothing_to_train) == (1, 1)


def test_data_without_a_document_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no document to train on in 1 rows.*line 1 has the columns label"):
        open_rows(tmp_path / "a.jsonl", [{"label": 1}], chat_tokenizer(), skip_bad=True)
    with pytest.raises(UserError, match="no document to train on in 0 rows"):
        open_rows(tmp_path / "b.jsonl", [], chat_tokenizer())
    with pytest.raises(UserError, match="in 3 rows of the data; 3 are bad, the first: ") as refused:
        open_rows(tmp_path / "c.jsonl", [{"label": 1}] * 3, chat_tokenizer(), skip_bad=True)
    assert str(refused.value).count("has the columns") == 1
    with pytest.raises(UserError, match=r"in 1 rows of the data; 1 have nothing to train on$"):
        open_rows(tmp_path / "d.jsonl", [{"text": ""}], chat_tokenizer())


def test_a_text_longer_than_a_sample_goes_on_in_the_next(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(merges=0)
    samples = open_rows(tmp_path / "a.jsonl", [{"text": "a" * 120}], tokenizer, sequence_length=50)
    assert [sum(len(segment.tokens) for segment in sample) for sample in segments_of(samples)] == [50, 50, 21]
    counts = samples.counts
    assert (counts.tokens, counts.trained_tokens, counts.truncated, counts.too_long) == (121, 120, 0, 0)


def test_long_answers_are_cut_and_late_ones_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b" * 100},
        {"prompt": "a" * 100, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    counts = open_rows(tmp_path / "a.jsonl", rows, chat_tokenizer(merges=0), sequence_length=50).counts
    assert (counts.documents, counts.truncated, counts.too_long) == (2, 1, 1)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        open_rows(tmp_path / "a.jsonl", [{"text": "a"}], tokenizer)


def test_tokens_beyond_the_vocabulary_of_the_model_are_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(merges=0)
    largest = max(tokenizer("abc")["input_ids"])
    open_rows(tmp_path / "a.jsonl", [{"text": "abc"}], tokenizer, vocabulary=largest + 1)
    with pytest.raises(
        UserError, match=rf"has the token {largest}, but the model has embeddings for {largest} "
    ):
        open_rows(tmp_path / "a.jsonl", [{"text": "abc"}], tokenizer, vocabulary=largest)
