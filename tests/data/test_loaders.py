"""Tests of the user's own ``DataLoader``: what is kept of it, and that what is lost is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from orchestrator.data.adapt import as_source
from orchestrator.data.loaders import LoadedSamples, SampledSource, read_loader
from orchestrator.data.source import LoaderSettings, SavedPlace
from orchestrator.errors import UserError
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from tests.train.data.test_stream import CPU, Lonely, flat, samples_of

NUMBERS: Any = list(range(100, 120))


def feed_of(data: Any, world: World | None = None, **options: Any) -> Feed:
    return open_feed(
        data,
        world or World.single_process(),
        global_batch=8,
        micro_batch=8,
        seed=0,
        loader=LoaderOptions(**options),
    )


def samples(data: Any, epoch: int = 0, position: int = 0, saved: SavedPlace | None = None) -> list[int]:
    return flat([samples_of(batch) for batch in feed_of(data).steps(epoch, position, saved)])


def negated(batch: list[int]) -> torch.Tensor:
    return -torch.tensor(batch)


def test_a_loader_that_shuffles_gives_random_access_and_keeps_its_collate() -> None:
    loader = DataLoader(NUMBERS, batch_size=4, shuffle=True, collate_fn=negated, num_workers=3)
    data = read_loader(loader)
    assert isinstance(data, LoadedSamples)
    assert data.loader_settings == LoaderSettings(batch_size=4, num_workers=3)
    found = samples(loader)
    assert sorted(found) == sorted(-number for number in NUMBERS)
    assert found != sorted(found, reverse=True)
    assert found == samples(loader)
    assert feed_of(loader).note == "of the DataLoader: its shuffling is replaced by the order of --seed"


def test_a_loader_that_does_not_shuffle_keeps_its_order_and_knows_its_length() -> None:
    loader = DataLoader(NUMBERS, batch_size=4)
    assert samples(loader, epoch=0) == samples(loader, epoch=1) == NUMBERS
    feed = feed_of(loader)
    assert feed.num_samples == 20
    assert feed.steps_from(0) == 3
    assert feed.note is None
    dropping = read_loader(DataLoader(NUMBERS, batch_size=4, drop_last=True))
    assert dropping.note == "of the DataLoader: a short last batch is trained on, in spite of drop_last"


SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(0, 20, 2)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 20, 15, generator=torch.Generator()),
    "drawn with replacement": lambda: RandomSampler(NUMBERS, replacement=True, num_samples=33),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_read_in_order_the_same_on_all_workers_and_after_a_resume(name: str) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(NUMBERS, batch_size=4, sampler=SAMPLERS[name]())

    expected = samples(loader(), epoch=1)
    assert len(expected) == len(SAMPLERS[name]())
    assert set(expected) <= set(NUMBERS)
    used = loader()
    assert samples(used) != expected, "each epoch has its own order"
    assert samples(used, epoch=1) == expected
    ranks = [feed_of(loader(), Lonely(rank, 3, CPU)).steps(1) for rank in range(3)]
    assert sorted(flat([samples_of(batch) for steps in ranks for batch in steps])) == sorted(expected)
    feed = feed_of(loader())
    begun = samples_of(next(feed.steps(1)))
    assert begun + samples(loader(), 1, 8, feed.place(8)) == expected


def test_an_order_that_a_resumed_run_does_not_find_again_is_refused() -> None:
    class Changing(SequentialSampler):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter([(index + self.passes) % 20 for index in range(20)])

    loader = DataLoader(NUMBERS, batch_size=4, sampler=Changing(NUMBERS))
    feed = feed_of(loader)
    samples_of(next(feed.steps(0)))
    with pytest.raises(UserError, match="of the epoch is another one"):
        samples(loader, 0, 8, feed.place(8))


def test_a_sampler_that_divides_by_rank_is_replaced() -> None:
    for shuffle, kind in ((True, LoadedSamples), (False, SampledSource)):
        sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=shuffle)
        loader = DataLoader(NUMBERS, batch_size=4, sampler=sampler)
        assert isinstance(read_loader(loader), kind)
        assert sorted(samples(loader)) == NUMBERS


def test_batches_of_a_batch_sampler_are_joined_and_a_note_says_so() -> None:
    loader = DataLoader(NUMBERS, batch_sampler=[[3, 1], [0], [7, 7, 2]])
    assert samples(loader) == [103, 101, 100, 107, 107, 102]
    assert "the batches of its list are joined and divided anew" in str(read_loader(loader).note)
    assert read_loader(loader).loader_settings == LoaderSettings(None, 0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


def test_a_loader_of_an_iterable_data_set_keeps_its_collate() -> None:
    loader = DataLoader(Stream(), batch_size=4, collate_fn=negated, worker_init_fn=print)
    assert samples(loader) == [-number for number in NUMBERS]
    note = str(read_loader(loader).note)
    assert "a Stream, has no state_dict" in note
    assert "its worker_init_fn is not called" in note
    assert read_loader(loader).loader_settings == LoaderSettings(4, 0)


def test_a_loader_without_a_batch_size_is_refused() -> None:
    with pytest.raises(UserError, match="a DataLoader with batch_size=None"):
        as_source(DataLoader(Stream(), batch_size=None))


class Marked(list[int]):
    """Numbers that a function marks in the loader process."""

    mark = 0

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + Marked.mark


def set_mark(number: int) -> None:
    del number
    Marked.mark = 1000


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_function_that_prepares_a_loader_process_is_kept(shuffle: bool) -> None:
    marked: Any = Marked(NUMBERS)
    loader = DataLoader(marked, batch_size=4, worker_init_fn=set_mark, shuffle=shuffle)
    feed = feed_of(loader, loader_workers=1)
    found = flat([samples_of(batch) for batch in feed.steps(0)])
    feed.close()
    assert sorted(found) == [1000 + number for number in NUMBERS]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_torchdata_is_read_like_one_of_torch(shuffle: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(NUMBERS, batch_size=4, shuffle=shuffle)
    assert isinstance(read_loader(loader), LoadedSamples if shuffle else SampledSource)
    assert sorted(samples(loader)) == NUMBERS
    assert read_loader(loader).loader_settings == LoaderSettings(4, 0)
