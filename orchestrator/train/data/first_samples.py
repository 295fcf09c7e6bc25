"""The first samples that can be loaded, for measuring: only the training decides on bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.data.source import Source
from orchestrator.tasks.task import Gatherable
from orchestrator.tasks.user_code import user_code
from orchestrator.train.data.loading import MAX_TRIED


def with_random_access(data: Any, count: int) -> Any:
    """Return data with ``__len__`` and ``__getitem__`` or ``gather``: of a source, its first samples.

    A bad sample is replaced by the next good one."""
    if isinstance(data, Gatherable):
        return data
    return _FirstSamples(data, count) if isinstance(data, Source) else _GoodSamples(data)


class _FirstSamples:
    """The first good samples of a source; if all that were tried are bad, the first one raises its error."""

    def __init__(self, source: Source, count: int) -> None:
        if hasattr(source, "collate"):
            self.collate = source.collate
        self._samples: list[Any] = []
        first_error: Exception | None = None
        for item in _items(source, count):
            try:
                self._samples.append(source.decode(item))
            except Exception as error:
                first_error = first_error or error
            if len(self._samples) == count:
                break
        if first_error is not None and not self._samples:
            with user_code("reading the first samples"):
                raise first_error

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


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
    """Data with random access, whose bad samples are replaced by the next good ones."""

    def __init__(self, data: Any) -> None:
        self._data = data
        if hasattr(data, "collate"):
            self.collate = data.collate

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        first_error: Exception | None = None
        for number in range(min(len(self), MAX_TRIED)):
            try:
                return self._data[(index + number) % len(self)]
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error
