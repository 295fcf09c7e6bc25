"""Looks for NaN and infinity in the samples of a step whose loss is no number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from orchestrator.train.device.batches import tensors_of

ADVICE = "Clean the data, or leave the sample out"


def find_bad_input(samples: Iterable[tuple[str, Callable[[], Any]]], split: str = "training") -> str | None:
    """Return a sentence about the first sample with NaN or infinity; None if all are finite.

    ``samples`` are names of samples of a split, with functions that return them.
    """
    for name, read in samples:
        # The data may be read only once, or differ from one read to the next.
        with suppress(Exception):
            for field, tensor in _fields(read()):
                kind = _not_finite(tensor)
                if kind:
                    where = f" in field {field}" if field else ""
                    return f"{split} sample {name} has {kind}{where}"
    return None


def _fields(sample: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a sample, each with the name or position of its field."""
    if isinstance(sample, dict):
        named = [(repr(key), value) for key, value in sample.items()]
    elif isinstance(sample, tuple) and hasattr(sample, "_fields"):
        names: Sequence[str] = sample._fields
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
