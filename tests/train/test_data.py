"""Tests of the feed: its order depends on seed and epoch alone, and each sample is seen once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from orchestrator.errors import UserError
from orchestrator.tasks.task import TensorData
from orchestrator.train.data import Feed, StepBatch
from orchestrator.train.loading import LoaderOptions
from orchestrator.train.parts.world import World

CPU = torch.device("cpu")


def make_feed(
    data: Any, global_batch: int, micro_batch: int, world: World | None = None, seed: int | None = 0
) -> Feed:
    """A feed of any data, or of ``data`` numbered samples."""
    return Feed(
        TensorData(torch.arange(data)) if isinstance(data, int) else data,
        world or World.single_process(),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        loader=LoaderOptions(),
    )


def samples_of(batch: StepBatch) -> list[int]:
    """The samples of a step that count."""
    micro_batches = [micro_batch for micro_batch in batch.micro_batches if micro_batch.num_samples]
    return [int(sample) for micro_batch in micro_batches for sample in micro_batch.fetch()[0]]


def samples_by_step(steps: Iterable[StepBatch]) -> list[list[int]]:
    return [samples_of(batch) for batch in steps]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 17), st.integers(1, 4), st.integers(0, 3))
def test_each_sample_is_seen_once_and_steps_do_not_depend_on_the_split(
    samples: int, global_batch: int, micro_batch: int, workers: int, epoch: int
) -> None:
    expected = samples_by_step(make_feed(samples, global_batch, global_batch).steps(epoch))
    assert sorted(sample for step in expected for sample in step) == list(range(samples))
    worlds = [World(rank, workers, CPU) for rank in range(workers)]
    ranks = [
        samples_by_step(make_feed(samples, global_batch, micro_batch, world).steps(epoch)) for world in worlds
    ]
    for number, step in enumerate(expected):
        assert sorted(sample for rank in ranks for sample in rank[number]) == sorted(step)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = [make_feed(50, 10, 10, seed=seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == make_feed(50, 7, 3).order(0).tolist()
    assert make_feed(5, 2, 2, seed=None).order(3).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 20), st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_an_epoch_can_start_at_any_step(first_step: int, samples: int) -> None:
    samples = max(1, samples)
    feed = make_feed(samples, 10, 4)
    position = first_step * min(10, samples)
    assert samples_by_step(feed.steps(2, position)) == samples_by_step(feed.steps(2))[first_step:]


def test_another_batch_size_continues_at_the_same_sample() -> None:
    begun = [sample for step in samples_by_step(make_feed(50, 8, 8).steps(1))[:3] for sample in step]
    rest = [sample for step in samples_by_step(make_feed(50, 7, 3).steps(1, len(begun))) for sample in step]
    assert sorted(begun + rest) == list(range(50))


@pytest.mark.parametrize(
    "data", [torch.zeros(4, 2), (torch.zeros(4), torch.ones(4)), TensorDataset(torch.zeros(4)), [1, 2, 3, 4]]
)
def test_tensors_and_sequences_are_data(data: Any) -> None:
    assert make_feed(data, 2, 2).steps_per_epoch == 2


def test_a_generator_and_an_empty_data_set_are_refused() -> None:
    with pytest.raises(UserError, match="generator"):
        make_feed((x for x in range(3)), 2, 2)
    with pytest.raises(UserError, match="empty"):
        make_feed([], 2, 2)
