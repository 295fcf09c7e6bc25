"""Recognises the data that users bring: data sets with random access stay, all others become sources."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from orchestrator.data.iterable import IterableSource
from orchestrator.data.loaders import read_loader
from orchestrator.data.ray_rows import RayRows, is_ray_dataset
from orchestrator.errors import UserError

_SHOWN_KEYS = 5


def as_source(data: Any) -> Any:
    """Return a data set with random access unchanged, and any other iterable as a ``Source``.

    Raises ``UserError`` for data that is neither.
    """
    if isinstance(data, DataLoader):
        return read_loader(data)
    if is_ray_dataset(data):
        return RayRows(data)
    if isinstance(data, Mapping) and data and 0 not in data:
        raise UserError(_not_a_mapping(data))
    if _has_random_access(data):
        return data
    if hasattr(data, "__iter__") and not isinstance(data, type | str | bytes):
        return IterableSource(data)
    raise UserError(
        f"the data is a {type(data).__name__}; tensors, a data set with __len__ and __getitem__, an iterable "
        "data set, a DataLoader, or a Source were needed (docs/data.md)"
    )


def _not_a_mapping(data: Mapping[Any, Any]) -> str:
    keys = ", ".join(repr(key) for key in islice(data, _SHOWN_KEYS))
    more = ", …" if len(data) > _SHOWN_KEYS else ""
    return (
        f"the data is a {type(data).__name__} with the keys {keys}{more}, which is not a data set: "
        "data[i] must be sample i. Give the tensors as TensorData(x, y), whose batches are tuples, or a "
        "data set whose items are dicts, which become dicts of batches (docs/data.md)"
    )


def _has_random_access(data: Any) -> bool:
    # An IterableDataset inherits a __getitem__ that raises, and may have a length.
    if isinstance(data, IterableDataset | type):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")
