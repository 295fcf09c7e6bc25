"""Data sets of Ray Data as sources. They are known by their methods: Ray itself is not imported here."""

from __future__ import annotations

from typing import Any

from orchestrator.data.iterable import IteratorReader
from orchestrator.data.source import Reader, Source, State

_METHODS = ("iter_rows", "streaming_split", "materialize")


class RayRows(Source):
    """The rows of a ``ray.data.Dataset``, each a dict by column, in the order of its blocks."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.is_materialized = type(data).__name__ == "MaterializedDataset"
        if self.is_materialized:
            self.num_samples = data.count()
        self.note = (
            f"the data, a Ray Data {type(data).__name__}, has no position: "
            "a resumed run reads the epoch again up to its position"
        )

    def read(self, epoch: int, state: State | None = None) -> Reader:
        del epoch, state
        # Blocks would come in the order in which their tasks end.
        self._data.context.execution_options.preserve_order = True
        return IteratorReader(iter(self._data.iter_rows()))


def is_ray_dataset(data: Any) -> bool:
    return not isinstance(data, type) and all(hasattr(data, method) for method in _METHODS)
