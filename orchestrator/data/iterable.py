"""Iterable data sets as sources: the user's own ``IterableDataset``, streams of Hugging Face ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from orchestrator.data.source import Reader, Source, State
from orchestrator.errors import UserError


class IterableSource(Source):
    """The samples that iterating over an object yields; each pass begins with ``iter``.

    ``set_epoch``, ``state_dict`` and ``load_state_dict`` are used where the object has them, the latter two
    also where its iterator has them.
    """

    def __init__(self, data: Any) -> None:
        if isinstance(data, Iterator):
            raise UserError(
                f"the data is a {type(data).__name__}, which can be read only once; an object whose __iter__ "
                "begins anew was needed, such as torch.utils.data.IterableDataset"
            )
        self._data = data
        has_state = _is_stateful(data)
        self._data_is_stateful = has_state and not _has_shuffle_buffer(data)
        self._first_state = data.state_dict() if self._data_is_stateful else None
        if hasattr(data, "collate"):
            self.collate = data.collate
        if not self._data_is_stateful and not _is_stateful(iter(data)):
            missing = (
                "a state without its shuffle buffer" if has_state else "no state_dict and load_state_dict"
            )
            self.note = (
                f"the data, a {type(data).__name__}, has {missing}: "
                "a resumed run reads the epoch again up to its position"
            )

    def read(self, epoch: int, state: State | None = None) -> Reader:
        data = self._data
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        if self._data_is_stateful:
            # The object may still hold the state of an earlier pass.
            data.load_state_dict(self._first_state if state is None else state)
            return IteratorReader(iter(data), data)
        iterator = iter(data)
        # As in torchdata, the iterator may hold the state.
        if state is not None and _is_stateful(iterator):
            iterator.load_state_dict(state)
        return IteratorReader(iterator, iterator if _is_stateful(iterator) else None)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _has_shuffle_buffer(data: Any) -> bool:
    """Return whether a stream of ``datasets`` shuffles: its state does not hold the rows in its buffer."""
    examples = getattr(data, "_ex_iterable", None)
    while examples is not None:
        if type(examples).__name__ == "BufferShuffledExamplesIterable":
            return True
        examples = getattr(examples, "ex_iterable", None)
    return False


class IteratorReader(Reader):
    def __init__(self, iterator: Iterator[Any], stateful: Any = None) -> None:
        """``stateful`` is the object whose state is the place of the iterator."""
        self._iterator = iterator
        self._stateful = stateful

    def take(self, count: int) -> list[Any]:
        return list(islice(self._iterator, count))

    def state(self) -> State | None:
        return as_json(self._stateful.state_dict()) if self._stateful is not None else None


def as_json(state: Any) -> State | None:
    """Return a copy of a state as JSON would hold it; None if it cannot."""
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        return None
    return copy if isinstance(copy, dict) else None
