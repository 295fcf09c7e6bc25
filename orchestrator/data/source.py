"""The interface of data that is read in order: samples without random access, such as files of lines.

Every worker reads the whole source and keeps its share of each step, so the samples of a step do not depend
on the number of workers. What is read are raw items; a worker decodes only those that it trains on.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]
"""The place of a reader in its source, as values that JSON can hold."""

_SKIPPED_AT_ONCE = 1024


@dataclass(frozen=True)
class SavedPlace:
    """A place in a source from which reading can begin; part of a checkpoint."""

    position: int
    """Items before it."""
    state: State | None
    """The reader's state there; None if only reading from the beginning leads there."""
    digest: str
    """The digest of the next item, by which a resumed run recognises it."""


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of a user's ``DataLoader`` that become defaults of the run."""

    batch_size: int | None
    """Samples per worker and micro-batch; None if a batch sampler of the user's decides."""
    num_workers: int


class Reader(ABC):
    """One pass over a source."""

    @abstractmethod
    def take(self, count: int) -> list[Any]:
        """Return the next raw items: ``count`` of them, or fewer at the end of the source."""

    def state(self) -> State | None:
        """Return the place of the next item; None if only reading from the beginning leads there."""
        return None

    def skip(self, count: int, on_progress: Callable[[], None] = lambda: None) -> int:
        """Read on without using the items. Return their number: fewer than ``count`` at the end."""
        skipped = 0
        while skipped < count:
            items = self.take(min(count - skipped, _SKIPPED_AT_ONCE))
            if not items:
                break
            skipped += len(items)
            on_progress()
        return skipped


class Source(ABC):
    """Samples in an order of their own that is the same whenever it is read.

    A source may have ``collate``, which makes a batch of a list of samples; the default is torch's
    ``default_collate``.
    """

    note: str | None = None
    """The limitations of this source, for the record of the run; None without any."""
    num_samples: int | None = None
    """Samples of a pass; None if only reading them all would tell."""
    loader_settings: LoaderSettings | None = None

    @abstractmethod
    def read(self, epoch: int, state: State | None = None) -> Reader:
        """Begin a pass at the beginning, or at a state that a reader of the same epoch returned."""

    def name_of(self, item: Any, position: int) -> str:
        """Return the name of an item, for messages: its position, or its place in a file."""
        del item
        return str(position)

    def digest(self, item: Any) -> str:
        """Return a hash of an item's content, the same wherever the data lies."""
        return digest(item)

    def decode(self, item: Any) -> Any:
        """Return the sample of a raw item. It may run in another process than the reader."""
        return item


def digest(item: Any) -> str:
    """Return a hash of an item, the same in every process; unknown objects count by their type alone."""
    content = hashlib.sha256()
    _add(content.update, item)
    return content.hexdigest()[:16]


def _add(add: Callable[[bytes], None], value: Any) -> None:
    add(type(value).__name__.encode())
    if isinstance(value, bytes):
        add(value)
    elif isinstance(value, str | int | float | bool | None):
        add(repr(value).encode())
    elif isinstance(value, Tensor):
        add(f"{value.dtype} {tuple(value.shape)}".encode())
        add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        add(f"{value.dtype} {value.shape}".encode())
        add(np.ascontiguousarray(value).tobytes() if value.dtype != object else b"")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _add(add, key)
            _add(add, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _add(add, part)
