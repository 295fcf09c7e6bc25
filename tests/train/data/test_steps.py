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
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.steps import StepBatch, as_dataset
from orchestrator.train.group.world import World

CPU = torch.device("cpu")


def make_feed(
    data: Any, global_batch: int, micro_batch: int, world: World | None = None, seed: int | None = 0
) -> IndexedFeed:
    """A feed of any data, or of ``data`` numbered samples."""
    return IndexedFeed(
        as_dataset(TensorData(torch.arange(data)) if isinstance(data, int) else data),
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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 17), st.integers(1, 4))
def test_the_counts_of_a_step_are_those_of_its_samples(
    samples: int, global_batch: int, micro_batch: int, workers: int
) -> None:
    """Each rank's micro-batches say how many samples count, where they begin, and who has none."""
    feeds = [
        make_feed(samples, global_batch, micro_batch, World(rank, workers, CPU)) for rank in range(workers)
    ]
    order = feeds[0].order(1).tolist()
    begin = 0
    largest = [0] * workers
    for steps in zip(*(feed.steps(1) for feed in feeds), strict=True):
        every = [batch for step in steps for batch in step.micro_batches]
        num_samples = sum(batch.num_samples for batch in every)
        assert {step.global_samples for step in steps} == {num_samples}
        all_have_samples = all(batch.num_samples for batch in every)
        assert {step.all_have_samples for step in steps} == {all_have_samples}
        for batch in every:
            rows = batch.fetch()[0].tolist()
            first = begin + batch.first_sample
            assert rows == order[first : first + len(rows)]
            assert len(rows) == (batch.num_samples or min(2, samples))
            assert len(rows) == batch.num_dummies
        for rank, step in enumerate(steps):
            largest[rank] = max(largest[rank], *(batch.num_samples for batch in step.micro_batches))
        begin += num_samples
    assert begin == samples
    assert [feed.largest_micro_batch for feed in feeds] == [max(1, count) for count in largest]


@pytest.mark.parametrize(("samples", "expected"), [(1, [0]), (2, [0, 1]), (4, [2, 3]), (9, [3, 4])])
def test_a_worker_without_samples_computes_two_near_its_place(samples: int, expected: list[int]) -> None:
    """The second of two workers has none of a micro-batch of one sample, the first."""
    feed = make_feed(samples, 3, 1, World(0, 2, CPU).with_shares([1e-9, 1.0]), seed=None)
    step = list(feed.steps(0))[-1 if samples < 9 else 1]
    micro_batch = step.micro_batches[0]
    assert (micro_batch.num_samples, micro_batch.num_dummies) == (0, len(expected))
    assert micro_batch.fetch()[0].tolist() == expected


class Recorded:
    """Gatherable data of four samples that records the device of the indices it is given."""

    nbytes = 0

    def __init__(self, **attributes: Any) -> None:
        self.index_device = torch.device("cpu")
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def gather(self, index_B: torch.Tensor) -> torch.Tensor:
        self.index_device = index_B.device
        return torch.zeros(len(index_B))

    def to(self, device: torch.device) -> Recorded:
        return Recorded(moved_to=device)


@pytest.mark.parametrize(
    ("attributes", "device"),
    [
        ({}, "cpu"),
        ({"rows": torch.zeros(4, device="meta")}, "meta"),
        ({"rows": (torch.zeros(4, device="meta"),)}, "meta"),
        ({"rows": ("a name", torch.zeros(4, device="meta"))}, "meta"),
    ],
)
def test_indices_are_on_the_device_of_the_data(attributes: dict[str, Any], device: str) -> None:
    data = Recorded(**attributes)
    next(make_feed(data, 2, 2).steps(0)).micro_batches[0].fetch()
    assert data.index_device.type == device


@pytest.mark.parametrize("on_device", [False, True])
def test_data_moves_to_the_device_only_if_asked(on_device: bool) -> None:
    world = World.single_process("meta")
    options = LoaderOptions(on_device=on_device)
    feed = IndexedFeed(Recorded(), world, global_batch=2, micro_batch=2, seed=0, loader=options)
    assert hasattr(feed.data, "moved_to") == on_device


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
    assert make_feed(data, 2, 2).steps_from(0) == 2


def test_a_generator_and_an_empty_data_set_are_refused() -> None:
    with pytest.raises(UserError, match="generator"):
        make_feed((x for x in range(3)), 2, 2)
    with pytest.raises(UserError, match="empty"):
        make_feed([], 2, 2)
