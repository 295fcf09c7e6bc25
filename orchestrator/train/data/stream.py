"""Feeds of data that is read in order, from a ``Source``.

Every worker reads all raw items and decodes its share. The items come in blocks: a step at a time or, where
they are shuffled, a buffer at a time. A block's order depends on seed, epoch and place alone, so that
reading can begin at any block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

from experts.model import mix
from orchestrator.data.cursor import CursorHooks, open_cursor
from orchestrator.data.source import SavedPlace, Source
from orchestrator.errors import UserError
from orchestrator.tasks.user_code import user_code
from orchestrator.train.data.loading import (
    EVALUATION,
    TRAINING,
    BatchLoader,
    BatchRequest,
    LoadedBatch,
    LoaderOptions,
    RandomState,
)
from orchestrator.train.data.steps import Feed, Share, StepBatch, different_ends
from orchestrator.train.group.world import World

_MAX_READ_AGAIN = 100_000  # items that are read once more to name a bad sample
_COMPARED_DIGITS = 12  # of a digest: as many as a float holds exactly


@dataclass(frozen=True)
class _RequestedStep:
    """A step whose batches the loader was asked for."""

    begin: int
    end: int
    shares: list[Share]
    next_samples: int


class StreamFeed(Feed):
    """A source as a stream of steps."""

    def __init__(
        self,
        source: Source,
        world: World,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int | None,
        loader: LoaderOptions,
    ) -> None:
        super().__init__(world, global_batch, micro_batch, seed)
        self.hooks = CursorHooks()
        self.skips_bad = loader.skip_bad
        self._source = source
        purpose = loader.purpose or (EVALUATION if seed is None else TRAINING)
        self._loader = BatchLoader(_DecodedItems(source), loader, world.device, purpose)
        # Evaluation, which has no seed, keeps the order of the source.
        self._buffer = loader.shuffle_buffer if seed is not None else 0
        self._places: deque[SavedPlace] = deque()
        self._requested: deque[_RequestedStep] = deque()
        self._end: int | None = None

    def steps(self, epoch: int, position: int = 0, saved: SavedPlace | None = None) -> Iterator[StepBatch]:
        self._places.clear()
        self._requested.clear()
        self._end = None
        batches = self._loader.load(lambda: self._requests(epoch, position, saved))
        while True:
            with user_code("reading a batch of the data"):
                first = next(batches, None)
            if first is None:
                return
            step = self._requested.popleft()
            with user_code("reading a batch of the data"):
                loaded = [first, *(next(batches) for _ in step.shares[1:])]
            shares, fetches, faults = self._without_bad_samples(step.shares, loaded)
            batch = self._step_batch(step.begin, step.end, shares, fetches)
            yield replace(batch, next_samples=step.next_samples, faults=faults)

    @property
    def num_samples(self) -> int | None:
        return self._source.num_samples

    @property
    def note(self) -> str | None:
        return self._source.note

    def place(self, position: int) -> SavedPlace | None:
        """Return the last place at or before a position; the loader may have read beyond it."""
        while len(self._places) > 1 and self._places[1].position <= position:
            self._places.popleft()
        return self._places[0] if self._places else None

    def named_samples(self, epoch: int, begin: int, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        if begin > _MAX_READ_AGAIN:
            return
        blocks = self._blocks(epoch, begin, None)
        for number, item in enumerate(islice(chain.from_iterable(blocks), count)):
            yield self._source.name_of(item, begin + number), partial(self._source.decode, item)

    def steps_from(self, position: int) -> int | None:
        """Return the steps from a sample on: 0 at the end of the epoch, None before it if the length of
        the source is unknown."""
        if self._end is not None and position >= self._end:
            return 0
        return super().steps_from(position)

    def close(self) -> None:
        self._loader.close()

    def _requests(self, epoch: int, position: int, saved: SavedPlace | None) -> Iterator[BatchRequest]:
        batches = self._global_batches(epoch, position, saved)
        begin, items = next(batches, (position, []))
        self._check_first(position, len(items))
        while items:
            next_begin, next_items = next(batches, (position, []))
            end = begin + len(items)
            shares = self._shares(begin, end)
            self._requested.append(_RequestedStep(begin, end, shares, len(next_items)))
            for share in shares:
                # Beyond the end of a step, its first samples serve as dummy samples.
                indices = range(share.samples.start - begin, share.samples.stop - begin)
                keys = tuple(items[index % len(items)] for index in indices)
                yield BatchRequest(mix(self.seed, "sample", epoch, share.samples.start), keys)
            begin, items = next_begin, next_items

    def _first_good(self) -> LoadedBatch:
        reader = self._source.read(epoch=0)
        items = chain.from_iterable(iter(lambda: reader.take(self.global_batch), []))
        return self._loader.first_good(items)

    def _dummy_samples(self, start: int) -> slice:
        return slice(start, start + 2)

    def _global_batches(
        self, epoch: int, position: int, saved: SavedPlace | None
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield the items of each step, with the position of the first one."""
        blocks = self._blocks(epoch, position, saved)
        rest: list[Any] = []
        for block in blocks:
            rest += block
            while len(rest) >= self.global_batch:
                yield position, rest[: self.global_batch]
                rest = rest[self.global_batch :]
                position += self.global_batch
        if rest:
            yield position, rest

    def _blocks(self, epoch: int, position: int, saved: SavedPlace | None) -> Iterator[list[Any]]:
        """Yield the items from a position on, block by block, each in its order."""
        size = self._buffer or self.global_batch
        begin = position - position % size if self._buffer else position
        # Random numbers that the source draws must neither depend on the model's nor change them.
        random_state = RandomState(mix(self.seed, "stream", epoch))
        with random_state.in_use():
            cursor = open_cursor(self._source, epoch, begin, saved, self.hooks)
            place = cursor.place()
        while place is not None:
            self._places.append(place)
            with random_state.in_use():
                items = cursor.take(size)
                following = cursor.place()
            if following is None:
                self._end = cursor.position
            yield self._in_order(items, epoch, place)[max(0, position - place.position) :]
            place = following

    def _in_order(self, items: list[Any], epoch: int, place: SavedPlace) -> list[Any]:
        """Return the items of a block in the order of the run."""
        if not self._buffer:
            return items
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch, place.position))
        return [items[index] for index in torch.randperm(len(items), generator=generator).tolist()]

    def _check_first(self, position: int, num_samples: int) -> None:
        """Refuse a source without samples, and one whose first step differs by worker."""
        if not self._places and position == 0:
            raise UserError("the data is empty; at least one sample is needed")
        if self.world.size == 1:
            return
        found = float(int(self._places[0].digest[:_COMPARED_DIGITS], 16)) if self._places else -1.0
        values = [found, float(num_samples)]
        largest, most, *negated = self.world.all_reduce_max(values + [-value for value in values])
        if largest != -negated[0]:
            raise UserError(
                "the workers read different samples at the same position; the data must have one order "
                "on all workers: sort what is listed, seed what is shuffled, and do not divide it by rank"
            )
        if most != -negated[1]:
            raise different_ends(self.world.rank, f"its first step has {num_samples} samples")


class _DecodedItems:
    """A source as a loader sees it: samples by their raw items."""

    def __init__(self, source: Source) -> None:
        self._source = source
        if hasattr(source, "collate"):
            self.collate = source.collate
        self.worker_init = getattr(source, "worker_init", None)

    def __getitem__(self, item: Any) -> Any:
        return self._source.decode(item)

    def name_of(self, item: Any) -> str:
        if type(self._source).name_of is Source.name_of:
            return "a sample"  # that name is its position, which is not known here
        name = self._source.name_of(item, 0).rstrip(",")
        return f"sample {name}" if name.isdecimal() else name
