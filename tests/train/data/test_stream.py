"""Tests of streams: each sample once, in one order, on any number of workers and after any resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from orchestrator.data.json_lines import JsonLines
from orchestrator.data.source import Reader, SavedPlace, Source, State, digest
from orchestrator.errors import TaskFailed, UserError
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.data.stream import StreamFeed
from orchestrator.train.group.world import World

CPU = torch.device("cpu")


class Numbers(Source):
    """The first numbers, with or without a state; counts what is read and what is decoded."""

    def __init__(self, count: int, stateful: bool = True) -> None:
        self.count = count
        self.stateful = stateful
        self.num_read = 0
        self.decoded: list[int] = []

    def read(self, epoch: int, state: State | None = None) -> Reader:
        return _NumberReader(self, state["next"] if state else 0)

    def decode(self, item: int) -> int:
        self.decoded.append(item)
        return item


class _NumberReader(Reader):
    def __init__(self, source: Numbers, first: int) -> None:
        self.source = source
        self.next = first

    def take(self, count: int) -> list[int]:
        items = list(range(self.next, min(self.next + count, self.source.count)))
        self.next += len(items)
        self.source.num_read += len(items)
        return items

    def state(self) -> State | None:
        return {"next": self.next} if self.source.stateful else None


class Lonely(World):
    """A worker of several, whose peers read the same as it does."""

    def all_reduce_max(self, values: Any) -> list[float]:
        return list(values)


def make_feed(
    data: Any, global_batch: int, micro_batch: int, world: World | None = None, **options: Any
) -> StreamFeed:
    feed = open_feed(
        data,
        world or World.single_process(),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        loader=LoaderOptions(**options),
    )
    assert isinstance(feed, StreamFeed)
    return feed


def samples_of(batch: StepBatch) -> list[int]:
    micro_batches = [micro_batch for micro_batch in batch.micro_batches if micro_batch.num_samples]
    return [int(sample) for micro_batch in micro_batches for sample in micro_batch.fetch()]


def flat(steps: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(steps))


def steps_of(feed: StreamFeed, epoch: int = 0, position: int = 0, saved: Any = None) -> list[list[int]]:
    return [samples_of(batch) for batch in feed.steps(epoch, position, saved)]


counts = st.integers(1, 60)
sizes = st.integers(1, 20)
buffers = st.sampled_from([0, 1, 7, 16, 100])


@settings(max_examples=60, deadline=None)
@given(counts, sizes, sizes, st.integers(1, 4), buffers, st.integers(0, 2))
def test_each_sample_is_seen_once_and_steps_do_not_depend_on_the_workers(
    count: int, global_batch: int, micro_batch: int, workers: int, buffer: int, epoch: int
) -> None:
    options: dict[str, Any] = {"shuffle_buffer": buffer}
    expected = steps_of(make_feed(Numbers(count), global_batch, global_batch, **options), epoch)
    assert sorted(flat(expected)) == list(range(count))
    assert [len(step) for step in expected[:-1]] == [global_batch] * (len(expected) - 1)
    ranks = [
        steps_of(
            make_feed(Numbers(count), global_batch, micro_batch, Lonely(rank, workers, CPU), **options), epoch
        )
        for rank in range(workers)
    ]
    for number, step in enumerate(expected):
        assert sorted(sample for rank in ranks for sample in rank[number]) == sorted(step)


@settings(max_examples=60, deadline=None)
@given(counts, sizes, buffers, st.integers(0, 8), st.booleans(), sizes)
def test_a_resumed_stream_goes_on_at_the_same_sample(
    count: int, global_batch: int, buffer: int, done: int, stateful: bool, next_batch: int
) -> None:
    """With its state or by reading on, and with another batch size too."""
    feed = make_feed(Numbers(count, stateful), global_batch, global_batch, shuffle_buffer=buffer)
    begun: list[int] = []
    saved: SavedPlace | None = None
    for _, batch in zip(range(done), feed.steps(1), strict=False):
        begun += samples_of(batch)
        saved = feed.place(len(begun))
    if saved is not None:
        saved = SavedPlace(**json.loads(json.dumps(saved.__dict__)))
    resumed = make_feed(Numbers(count, stateful), next_batch, next_batch, shuffle_buffer=buffer)
    rest = flat(steps_of(resumed, 1, len(begun), saved))
    whole = make_feed(Numbers(count), global_batch, global_batch, shuffle_buffer=buffer)
    assert begun + rest == flat(steps_of(whole, 1))


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    assert steps_of(make_feed(Numbers(7), 3, 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_shuffling_depends_on_the_epoch_and_stays_within_the_buffer() -> None:
    first, second = (
        flat(steps_of(make_feed(Numbers(64), 8, 8, shuffle_buffer=16), epoch)) for epoch in (0, 1)
    )
    assert first != second
    assert first != sorted(first)
    assert [number // 16 for number in first] == [place // 16 for place in range(64)]


def test_a_worker_decodes_its_share_alone_and_a_state_saves_reading() -> None:
    source = Numbers(1000)
    feed = make_feed(source, 10, 5, Lonely(1, 2, CPU))
    steps = feed.steps(0, 900, SavedPlace(900, {"next": 900}, digest(900)))
    assert samples_of(next(steps)) == [905, 906, 907, 908, 909]
    assert source.decoded == [905, 906, 907, 908, 909]
    assert source.num_read < 30


def test_a_state_that_leads_elsewhere_is_noticed_and_the_epoch_read_again() -> None:
    warnings: list[str] = []
    feed = make_feed(Numbers(50), 10, 10)
    feed.hooks.on_warning = warnings.append
    # As of a data set whose state is that of one sample too many.
    saved = SavedPlace(20, {"next": 21}, digest(20))
    assert steps_of(feed, 0, 20, saved) == [list(range(20, 30)), list(range(30, 40)), list(range(40, 50))]
    assert len(warnings) == 1
    assert "another sample" in warnings[0]


def test_data_that_has_changed_is_refused() -> None:
    with pytest.raises(UserError, match="sample 20 of the epoch is another one"):
        steps_of(make_feed(Numbers(50), 10, 10), 0, 20, SavedPlace(20, None, digest(3)))
    with pytest.raises(UserError, match="the data ends after 50 samples; the run was at sample 60"):
        steps_of(make_feed(Numbers(50), 10, 10), 0, 60)


def test_an_empty_source_is_refused_and_a_finished_epoch_is_not() -> None:
    with pytest.raises(UserError, match="the data is empty"):
        steps_of(make_feed(Numbers(0), 10, 10))
    assert steps_of(make_feed(Numbers(20), 10, 10), 0, 20) == []


def test_the_end_of_the_epoch_is_known_with_its_last_step() -> None:
    feed = make_feed(Numbers(25), 10, 10)
    position = 0
    left = []
    for batch in feed.steps(0):
        position += batch.global_samples
        left.append(feed.steps_from(position))
    assert left == [None, None, 0]


class Differing(Lonely):
    def all_reduce_max(self, values: Any) -> list[float]:
        return [value + 1 for value in values]


def test_workers_that_read_different_data_are_told() -> None:
    with pytest.raises(UserError, match="the workers read different samples"):
        steps_of(make_feed(Numbers(25), 10, 10, Differing(0, 2, CPU)))


def test_loader_processes_decode_the_same_batches(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{number}\n" for number in range(53)))
    expected = steps_of(make_feed(JsonLines(file), 8, 4, shuffle_buffer=16))
    feed = make_feed(JsonLines(file), 8, 4, shuffle_buffer=16, loader_workers=2)
    position = 0
    places = []
    steps = []
    for batch in feed.steps(0):
        steps.append(samples_of(batch))
        position += batch.global_samples
        places.append(feed.place(position))
    assert steps == expected
    # The loader reads ahead; the place to resume from does not.
    assert [place.position for place in places if place] == [0, 16, 16, 32, 32, 48, 48]
    assert steps_of(feed, 0, 16, places[1]) == expected[2:]
    feed.close()


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_bad_line_ends_the_step_with_its_file_and_number(tmp_path: Path, loader_workers: int) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("1\n2\n3\nfour\n")
    feed = make_feed(JsonLines(file), 2, 2, loader_workers=loader_workers)
    steps = feed.steps(0)
    assert samples_of(next(steps)) == [1, 2]
    with pytest.raises(UserError) as raised:
        next(steps)
    assert str(raised.value).startswith(f"{file}, line 4 is not JSON")
    assert "Traceback" not in str(raised.value)
    feed.close()


class Iterable(IterableDataset[int]):
    """Numbers with random gaps, drawn from the global random state."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        for _ in range(30):
            number += int(torch.randint(1, 1000, ()))
            yield number


def test_random_numbers_of_a_source_are_its_own() -> None:
    """The same in every pass over an epoch, whatever the model draws, and the model's unchanged."""
    torch.manual_seed(5)
    expected = flat(steps_of(make_feed(Iterable(), 7, 7)))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    found: list[int] = []
    for batch in make_feed(Iterable(), 7, 7).steps(0):
        torch.rand(10)
        found += samples_of(batch)
    assert found == expected
    assert flat(steps_of(make_feed(Iterable(), 5, 5), 0, 10)) == expected[10:]
    assert flat(steps_of(make_feed(Iterable(), 7, 7), 1)) != expected


class Failing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise RuntimeError("the disk is gone")


def test_an_error_of_the_users_data_set_shows_its_frame() -> None:
    with pytest.raises(TaskFailed, match=r"RuntimeError: the disk is gone(.|\n)*in __iter__"):
        steps_of(make_feed(Failing(), 2, 2))


class RandomNumbers(Numbers):
    """Numbers that are decoded at random, as augmented images are."""

    def decode(self, item: int) -> int:
        return int(torch.randint(2**40, ()))


@pytest.mark.parametrize("shuffle_buffer", [0, 4])
def test_randomness_in_decoding_differs_between_epochs_and_repeats_within_one(shuffle_buffer: int) -> None:
    feed = make_feed(RandomNumbers(8), 4, 2, shuffle_buffer=shuffle_buffer)
    first, second, again = ([samples_of(batch) for batch in feed.steps(epoch)] for epoch in (0, 1, 0))
    assert again == first
    assert not set(flat(first)) & set(flat(second))
