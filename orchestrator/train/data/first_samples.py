"""The first samples that can be loaded, for measuring: only the training decides on bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.data.source import Source
from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable
from orchestrator.tasks.user_code import user_code
from orchestrator.train.data.loading import MAX_TRIED, LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.batches import to_device
from orchestrator.train.group.world import World

_CPU = torch.device("cpu")


def first_samples(data: Any, count: int, device: torch.device = _CPU, split: str = "training") -> Any:
    """Return the first samples as a batch on a device. ``split`` is for messages.

    Short data is repeated, and a bad sample is replaced by the next good one."""
    known = _first_good(data, count) if isinstance(data, Source) else data
    if len(known) == 0:
        raise UserError(f"the {split} data is empty; at least one sample is needed")
    if isinstance(known, Gatherable):
        return to_device(known.gather(torch.arange(count) % len(known)), device, pin=False)
    feed = open_feed(
        _GoodSamples(known, count, getattr(data, "collate", None)),
        World.single_process(device),
        global_batch=count,
        micro_batch=count,
        seed=None,
        loader=LoaderOptions(purpose=f"a first batch of the {split} data"),
    )
    return next(feed.steps(0)).micro_batches[0].fetch()


def _first_good(source: Source, count: int) -> list[Any]:
    """Return the first good samples of a source; if all that were tried are bad, raise the first error."""
    samples: list[Any] = []
    first_error: Exception | None = None
    for item in _items(source, count):
        try:
            samples.append(source.decode(item))
        except Exception as error:
            first_error = first_error or error
        if len(samples) == count:
            break
    if first_error is not None and not samples:
        with user_code("reading the first samples"):
            raise first_error
    return samples


def _items(source: Source, count: int) -> Iterator[Any]:
    """Yield the first raw items, ``count`` at a time."""
    reader = source.read(epoch=0)
    num_read = 0
    while num_read < max(MAX_TRIED, count):
        with user_code("reading the first samples"):
            items = reader.take(count)
        if not items:
            return
        yield from items
        num_read += len(items)


class _GoodSamples:
    """A number of samples of data with random access, in which the next good one replaces a bad one."""

    def __init__(self, data: Any, count: int, collate: Any) -> None:
        self._data = data
        self._count = count
        if collate is not None:
            self.collate = collate

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        first_error: Exception | None = None
        for number in range(min(len(self._data), MAX_TRIED)):
            try:
                return self._data[(index + number) % len(self._data)]
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error
