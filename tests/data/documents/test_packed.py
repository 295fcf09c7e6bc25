"""Tests of packed samples: every trained token is a label once, and no label crosses documents."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.lm.packed_samples import segments_of
from orchestrator.data.documents.counts import ReadingCounts
from orchestrator.data.documents.document_set import usable_documents
from orchestrator.data.documents.kinds import CHAT, TEXT
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packed import PackedDocuments
from orchestrator.data.documents.store import StoreWriter, TokenDocument, TokenStore
from orchestrator.errors import UserError

_names = itertools.count()


def build_store(folder: Path, masks: list[list[bool]], kind: str) -> TokenStore:
    """Write documents whose tokens occur nowhere else: 1000 × document + place."""
    folder = folder / f"store{next(_names)}"
    folder.mkdir(parents=True)
    writer = StoreWriter(folder)
    documents = [
        TokenDocument(1000 * number + np.arange(len(mask)), np.array(mask))
        for number, mask in enumerate(masks)
    ]
    # Two batches: bits of the mask go on in the middle of a byte.
    writer.add(documents[:1])
    writer.add(documents[1:])
    writer.finish(ReadingCounts(), kind)
    return TokenStore(folder)


def packed(store: TokenStore, options: DocumentOptions) -> PackedDocuments:
    return PackedDocuments(usable_documents(store, options), options)


def labels_of(samples: PackedDocuments) -> Counter[int]:
    """Return how often each token is a label; a label is the next token of its document."""
    found: Counter[int] = Counter()
    for sample in segments_of(samples):
        for segment in sample:
            assert {token // 1000 for token in segment.tokens} == {segment.tokens[0] // 1000}
            for place, label in segment.labelled():
                assert label == segment.tokens[place] + 1
                found[label] += 1
    return found


def expected_labels(masks: list[list[bool]], limit: int | None) -> set[int]:
    """Return the trained tokens that can be labels, with ``limit`` positions for each document."""
    last = (limit or 10**6) + 1
    return {
        1000 * number + place
        for number, mask in enumerate(masks)
        for place in range(1, min(len(mask), last))
        if mask[place]
    }


masks_of_documents = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=40).map(lambda mask: [*mask, True, False]),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(masks=masks_of_documents, length=st.integers(2, 50), packing=st.booleans(), seed=st.integers(0, 99))
def test_every_trained_token_of_a_chat_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, masks: list[list[bool]], length: int, packing: bool, seed: int
) -> None:
    store = build_store(tmp_path_factory.mktemp("chats"), masks, kind=CHAT)
    options = DocumentOptions(length, packing=packing, seed=seed)
    expected = expected_labels(masks, length)
    if not expected:
        with pytest.raises(UserError, match="raise --sequence-length"):
            packed(store, options)
        return
    samples = packed(store, options)
    assert labels_of(samples) == Counter(expected)
    counts = samples.counts
    kept = {label // 1000 for label in expected}
    assert counts.documents == len(kept)
    assert counts.too_long == len(masks) - len(kept)
    assert counts.truncated == sum(len(masks[number]) > length for number in kept)
    assert counts.trained_tokens == len(expected)
    assert counts.tokens == sum(min(len(masks[number]), length) for number in kept)
    assert counts.padding == pytest.approx(1 - counts.tokens / (length * len(samples)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=30),
    length=st.integers(2, 50),
    packing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_of_a_text_but_the_first_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, packing: bool, seed: int
) -> None:
    masks = [[True] * size for size in lengths]
    store = build_store(tmp_path_factory.mktemp("texts"), masks, kind=TEXT)
    samples = packed(store, DocumentOptions(length, packing=packing, seed=seed))
    assert labels_of(samples) == Counter(expected_labels(masks, None))
    assert samples.counts.trained_tokens == sum(lengths) - len(lengths)
    if packing:
        assert len(samples) == -(-sum(lengths) // length)
        full = [sum(len(segment.tokens) for segment in sample) for sample in segments_of(samples)]
        assert full[:-1] == [length] * (len(samples) - 1)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60), length=st.integers(40, 60))
def test_chats_are_packed_best_fit(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int
) -> None:
    store = build_store(tmp_path_factory.mktemp("fit"), [[True] * size for size in lengths], kind=CHAT)
    spaces: list[int] = []
    for size in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else length) - size)
    used = [
        sum(len(segment.tokens) for segment in sample)
        for sample in segments_of(packed(store, DocumentOptions(length)))
    ]
    assert sorted(length - size for size in used) == sorted(spaces)


def test_a_batch_is_its_samples_in_any_order(tmp_path: Path) -> None:
    masks = [[True] * size for size in (5, 9, 3, 17, 8, 2, 11)]
    samples = packed(build_store(tmp_path, masks, kind=CHAT), DocumentOptions(20))
    order = [2, 0, 1, 2][: len(samples) + 1]
    batch = samples.gather(torch.tensor(order))
    for row, index in enumerate(order):
        single = samples.gather(torch.tensor([index]))
        for name, values in batch.items():
            assert values.dtype == torch.int64
            assert torch.equal(values[row], single[name][0])


def test_the_seed_chooses_the_order_and_the_same_seed_the_same(tmp_path: Path) -> None:
    store = build_store(tmp_path, [[True] * 4 for _ in range(40)], kind=TEXT)
    first, again, other = (packed(store, DocumentOptions(8, seed=seed)) for seed in (1, 1, 2))
    assert segments_of(first) == segments_of(again)
    assert segments_of(first) != segments_of(other)


def test_pickled_samples_map_the_files_again(tmp_path: Path) -> None:
    samples = packed(build_store(tmp_path, [[True] * 400] * 50, kind=CHAT), DocumentOptions(500))
    pickled = pickle.dumps(samples)
    assert len(pickled) < 20_000 < samples.nbytes
    assert segments_of(pickle.loads(pickled)) == segments_of(samples)  # noqa: S301


@pytest.mark.parametrize("kind", [TEXT, CHAT])
def test_held_out_documents_are_whole_and_disjoint(tmp_path: Path, kind: str) -> None:
    masks = [[True] * size for size in range(2, 32)]
    samples = packed(build_store(tmp_path, masks, kind), DocumentOptions(32))
    train, validation = samples.held_out(0.1)
    assert (train.counts.documents, validation.counts.documents) == (27, 3)
    assert labels_of(train) + labels_of(validation) == labels_of(samples)
    held_out = {label // 1000 for label in labels_of(validation)}
    assert not held_out & {label // 1000 for label in labels_of(train)}
    again = packed(build_store(tmp_path, masks, kind), DocumentOptions(32)).held_out(0.1)[1]
    assert labels_of(again) == labels_of(validation)


def test_a_small_share_holds_out_one_document(tmp_path: Path) -> None:
    store = build_store(tmp_path, [[True] * 5, [True] * 6], kind=CHAT)
    train, validation = packed(store, DocumentOptions(8)).held_out(0.001)
    assert train.counts.documents == validation.counts.documents == 1


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    store = build_store(tmp_path, [[True] * 100], kind=TEXT)
    train, validation = packed(store, DocumentOptions(16)).held_out(0.2)
    assert set(labels_of(train)) == set(range(1, 80))
    assert set(labels_of(validation)) == set(range(81, 100))


def test_a_single_chat_cannot_be_divided(tmp_path: Path) -> None:
    samples = packed(build_store(tmp_path, [[True] * 100], kind=CHAT), DocumentOptions(128))
    with pytest.raises(UserError, match="--validation-data"):
        samples.held_out(0.2)
    with pytest.raises(UserError, match=r"share of held-out documents is 1\.5"):
        samples.held_out(1.5)


def test_a_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(UserError, match="the sequence length is 1"):
        DocumentOptions(1)
