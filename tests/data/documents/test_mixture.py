"""Tests of mixtures: their shares of an epoch, the samples of several epochs, the same on workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.lm.language_models import lm_config, save_sums
from harness.lm.packed_samples import write_rows
from harness.lm.tokenizers import chat_tokenizer
from harness.runs.loop_runs import losses_in
from orchestrator.config.settings import Config
from orchestrator.data.documents.mixture import MixedDocuments, divide
from orchestrator.data.documents.opening import open_documents, open_mixture
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.errors import UserError
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.group.world import World
from orchestrator.trainer import Trainer

OPTIONS = DocumentOptions(sequence_length=16, packing=False)
CPU = torch.device("cpu")


class Numbered:
    """Samples that hold their own number."""

    nbytes = 0

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._count

    def gather(self, index_B: torch.Tensor) -> dict[str, torch.Tensor]:
        assert bool((index_B < self._count).all())
        return {"number": self._first + index_B}


def mixture(lengths: list[int], weights: list[float]) -> MixedDocuments:
    """Data set ``p`` has the samples 1000 × p, 1000 × p + 1, …"""
    parts: list[Any] = [Numbered(1000 * number, length) for number, length in enumerate(lengths)]
    return MixedDocuments(parts, weights)


def feed_of(data: MixedDocuments, rank: int = 0, workers: int = 1) -> IndexedFeed:
    world = World(rank, workers, CPU)
    return IndexedFeed(data, world, global_batch=6, micro_batch=2, seed=3, loader=LoaderOptions())


def numbers_by_step(feed: IndexedFeed, epoch: int, position: int = 0) -> list[list[int]]:
    steps = []
    for batch in feed.steps(epoch, position):
        counted = [micro_batch for micro_batch in batch.micro_batches if micro_batch.num_samples]
        steps.append([int(number) for each in counted for number in each.fetch()["number"]])
    return steps


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.one_of(st.just(0.0), st.floats(0.01, 10))), min_size=1, max_size=4
    ).filter(lambda rows: any(weight for _, weight in rows)),
    st.integers(1, 4),
)
def test_shares_are_exact_to_a_sample_and_all_samples_equally_often(
    rows: list[tuple[int, float]], epochs: int
) -> None:
    lengths = [length for length, _ in rows]
    weights = [weight for _, weight in rows]
    feed = feed_of(mixture(lengths, weights))
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        numbers = [number for step in numbers_by_step(feed, epoch) for number in step]
        assert len(numbers) == sum(lengths)
        counts = Counter(number // 1000 for number in numbers)
        for part, weight in enumerate(weights):
            assert abs(counts[part] - weight / sum(weights) * sum(lengths)) < 1 + 1e-9
        seen.update(numbers)
    for part, length in enumerate(lengths):
        uses = [seen[1000 * part + number] for number in range(length)]
        assert max(uses) - min(uses) <= 1


def test_a_large_weight_repeats_and_a_small_one_takes_others_each_epoch() -> None:
    feed = feed_of(mixture([10, 30], [0.5, 0.5]))
    epochs = [[number for step in numbers_by_step(feed, epoch) for number in step] for epoch in range(3)]
    assert Counter(number for number in epochs[0] if number < 1000) == dict.fromkeys(range(10), 2)
    large = [[number for number in numbers if number >= 1000] for numbers in epochs]
    assert [len(numbers) for numbers in large] == [20, 20, 20]
    assert len(set(large[0])) == 20
    # The second epoch begins with the ten that the first has left.
    assert set(large[0]) | set(large[1]) == set(range(1000, 1030))
    assert Counter(large[0] + large[1] + large[2]) == dict.fromkeys(range(1000, 1030), 2)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_samples_meet_in_a_step_on_any_number_of_workers(workers: int) -> None:
    data = mixture([7, 20], [0.6, 0.4])
    expected = numbers_by_step(feed_of(data), epoch=1)
    by_rank = [numbers_by_step(feed_of(data, rank, workers), epoch=1) for rank in range(workers)]
    for number, step in enumerate(expected):
        assert sorted(sample for steps in by_rank for sample in steps[number]) == sorted(step)


def test_an_epoch_goes_on_in_its_middle() -> None:
    whole = numbers_by_step(feed_of(mixture([7, 20], [0.6, 0.4])), epoch=2)
    rest = numbers_by_step(feed_of(mixture([7, 20], [0.6, 0.4])), epoch=2, position=12)
    assert rest == whole[2:]


def test_a_batch_has_its_samples_in_the_order_asked_for() -> None:
    batch = mixture([3, 4, 2], [1, 1, 1]).gather(torch.tensor([8, 0, 4, 3, 2, 7]))
    assert batch["number"].tolist() == [2001, 0, 1001, 1000, 2, 2000]


def test_what_is_left_over_goes_to_the_largest_fractions() -> None:
    assert divide(10, [0.7, 0.3]) == [7, 3]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(5, [0, 2]) == [0, 5]


def test_files_are_mixed_and_each_holds_out_its_own_part(tmp_path: Path) -> None:
    """The name of one has a colon and a number, as a weight after a colon would have."""
    few = write_rows(tmp_path / "few:0.7.jsonl", [{"text": f"few {number}"} for number in range(20)])
    many = write_rows(tmp_path / "many.jsonl", [{"text": f"many {number}"} for number in range(60)])
    notes: list[str] = []
    tokenizer = chat_tokenizer()
    weights = {str(few): 0.75, str(many): 0.25}
    mixed, held_out = open_mixture(weights, tokenizer, OPTIONS, notes.append, 0.1)
    assert held_out is not None
    assert (len(mixed), len(held_out)) == (72, 8)
    assert mixed.counts == [54, 18]
    assert any(
        "few:0.7.jsonl: 54 of 72 samples of an epoch (75.0%), 3 times its 18" in note for note in notes
    )
    texts = tokenizer.batch_decode(held_out.gather(torch.arange(8))["input_ids"])
    assert sum("few" in text for text in texts) == 2
    whole, nothing = open_mixture(weights, tokenizer, OPTIONS, notes.append, 0.0)
    assert (len(whole), nothing) == (80, None)
    alone = open_documents([str(many)], tokenizer, OPTIONS, notes.append)
    part = whole.gather(torch.arange(20, 80))["input_ids"]
    assert torch.equal(part, alone.gather(torch.arange(60))["input_ids"])


@pytest.mark.extended
def test_a_run_that_resumes_in_the_middle_of_an_epoch_has_the_same_losses(tmp_path: Path) -> None:
    few = save_sums(tmp_path / "few.jsonl", 12)
    config = lm_config(
        tmp_path,
        trackers=(),
        monitor_gpu=False,
        batch_size=2,
        log_every=1,
        schedule="constant",
        warmup_steps=0,
    )
    (many,) = config.data.data
    config = config.but(data=(str(few), many), data_weights=(0.5, 0.5))
    Trainer(config=config.but(run_dir=tmp_path / "whole", max_steps=5), quiet=True).fit()
    Trainer(config=config.but(run_dir=tmp_path / "run", max_steps=2), quiet=True).fit()
    Trainer(config=config.but(run_dir=tmp_path / "run", resume="auto", max_steps=5), quiet=True).fit()
    assert losses_in(tmp_path / "run") == losses_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.5,), r"data_weights has 1 of the 2 numbers that are needed.*\(a, b\)"),
        ((0.5, -0.5), "data_weights has -0.5; each must be a number of at least 0"),
        ((0.5, float("inf")), "data_weights has inf"),
        ((0.0, 0.0), "data_weights are all 0"),
        ("0.5,much", "data_weights is '0.5,much'; a list of numbers was needed"),
    ],
)
def test_bad_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config.of(task="lm", data=("a", "b"), data_weights=weights)


def test_an_entry_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UserError, match="data has 'a' twice"):
        Config.of(task="lm", data=("a", "a"), data_weights=(1, 2))


def test_another_seed_takes_other_samples() -> None:
    """Of a data set of which an epoch takes a part: the seed chooses it."""
    data = mixture([40, 40], [0.2, 0.8])
    by_seed = [sorted(data.epoch_samples(seed, 0).tolist()) for seed in (0, 1, 1)]
    assert by_seed[0] != by_seed[1]
    assert by_seed[1] == by_seed[2]
