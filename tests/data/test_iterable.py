"""Tests of iterable data sets as sources: with and without state, and streams of ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from orchestrator.data.adapt import as_source
from orchestrator.data.cursor import CursorHooks, open_cursor
from orchestrator.data.iterable import IterableSource
from orchestrator.data.source import SavedPlace
from orchestrator.errors import UserError


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Stateful(IterableDataset[int]):
    """Numbers whose first one depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next = 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.next < 20:
            self.next += 1
            self.num_read += 1
            yield 100 * self.epoch + self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def resumed(data: Any, saved: SavedPlace, position: int, warnings: list[str]) -> list[Any]:
    """The items from a position on, of a source that was made anew."""
    saved = SavedPlace(**json.loads(json.dumps(saved.__dict__)))
    hooks = CursorHooks(on_warning=warnings.append)
    return open_cursor(as_source(data), 1, position, saved, hooks).take(100)


def place_after(data: Any, count: int) -> tuple[SavedPlace, list[Any]]:
    """The place after so many items of the second pass, and the items that follow."""
    source = as_source(data)
    source.read(0).take(100)
    cursor = open_cursor(source, 1, 0, None, CursorHooks())
    cursor.take(count)
    place = cursor.place()
    assert place is not None
    return place, cursor.take(100)


def test_a_state_is_used_and_saves_reading() -> None:
    place, rest = place_after(Stateful(), 13)
    assert rest == list(range(113, 120))
    data = Stateful()
    warnings: list[str] = []
    assert resumed(data, place, 13, warnings) == rest
    assert data.num_read == 7
    assert not warnings


def test_without_a_state_the_epoch_is_read_again_and_a_note_says_so() -> None:
    source = as_source(Plain())
    assert isinstance(source, IterableSource)
    assert "reads the epoch again up to its position" in str(source.note)
    assert as_source(Stateful()).note is None
    place, rest = place_after(Plain(), 13)
    assert place.state is None
    assert resumed(Plain(), place, 15, []) == rest[2:]


class StatefulIterator:
    """Numbers whose iterator, not the data set, knows its place."""

    def __init__(self) -> None:
        self.next = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == 20:
            raise StopIteration
        self.next += 1
        self.num_read += 1
        return self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class OfIterators(IterableDataset[int]):
    def __init__(self) -> None:
        self.iterators: list[StatefulIterator] = []

    def __iter__(self) -> Iterator[int]:
        self.iterators.append(StatefulIterator())
        return self.iterators[-1]


def test_the_state_of_an_iterator_is_used_too() -> None:
    place, rest = place_after(OfIterators(), 13)
    data = OfIterators()
    assert as_source(data).note is None
    assert resumed(data, place, 13, []) == rest == list(range(13, 20))
    assert sum(iterator.num_read for iterator in data.iterators) == 7


def test_an_iterator_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(UserError, match="a generator, which can be read only once"):
        as_source(number for number in range(3))
    with pytest.raises(UserError, match="the data is a int"):
        as_source(3)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_of_hugging_face_resumes_at_the_same_row(shuffled: bool) -> None:
    """Its shuffle buffer is not part of its state: such a stream is read again."""
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        rows = datasets.Dataset.from_dict({"number": list(range(60))}).to_iterable_dataset(num_shards=3)
        return rows.shuffle(seed=1, buffer_size=16) if shuffled else rows

    place, rest = place_after(stream(), 37)
    warnings: list[str] = []
    assert len(rest) == 23
    assert resumed(stream(), place, 37, warnings) == rest
    assert not warnings
    assert (place.state is None) == shuffled
    assert ("without its shuffle buffer" in str(as_source(stream()).note)) == shuffled


def test_a_data_set_of_hugging_face_has_random_access() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"number": list(range(6))})
    assert as_source(data) is data
