"""Buckets of gradients: one all-reduce carries many small tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from orchestrator.types import MIB

BUCKET_MB = 25  # the default of torch's DDP


def gradient_buckets(tensors: Sequence[Tensor], cap_mb: int) -> Iterator[list[Tensor]]:
    """Group neighbouring tensors of one dtype and device into buckets of at most ``cap_mb``.

    The grouping follows from the list alone, so every worker forms the same buckets.
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        fits = sum(member.nbytes for member in bucket) + tensor.nbytes <= cap_mb * MIB
        if bucket and (not fits or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
