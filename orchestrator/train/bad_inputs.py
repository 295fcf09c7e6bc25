"""Looks for NaN and infinity in the samples of a step whose loss is no number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from orchestrator.tasks.task import Gatherable
from orchestrator.train.batches import tensors_of


def find_bad_input(data: Any, indices: Sequence[int]) -> str | None:
    """Return a sentence about the first of these samples with NaN or infinity; None if all are finite."""
    for index in indices:
        # The data may be read only once, or differ from one read to the next.
        with suppress(Exception):
            for field, tensor in _fields(_sample(data, index)):
                kind = _not_finite(tensor)
                if kind:
                    where = f" in field {field}" if field else ""
                    return f"training sample {index} has {kind}{where}"
    return None


def _sample(data: Any, index: int) -> Any:
    return data.gather(torch.tensor([index])) if isinstance(data, Gatherable) else data[index]


def _fields(sample: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a sample, each with the name or position of its field."""
    if isinstance(sample, dict):
        named = [(repr(key), value) for key, value in sample.items()]
    elif isinstance(sample, tuple) and hasattr(sample, "_fields"):
        names: Sequence[str] = sample._fields  # pyright: ignore[reportAttributeAccessIssue]
        named = [(repr(name), value) for name, value in zip(names, sample, strict=True)]
    elif isinstance(sample, list | tuple):
        named = [(str(position), value) for position, value in enumerate(sample)]
    else:
        named = [("", sample)]
    for name, value in named:
        for tensor in tensors_of(torch.as_tensor(value) if _is_array(value) else value):
            yield name, tensor


def _is_array(value: Any) -> bool:
    return isinstance(value, float) or hasattr(value, "__array__")


def _not_finite(tensor: Tensor) -> str | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.isnan().any():
        return "NaN"
    return "infinity" if tensor.isinf().any() else None
