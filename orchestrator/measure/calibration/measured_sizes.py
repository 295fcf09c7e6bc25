"""The sizes at which a calibration measures operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MeasuredSizes:
    """The sizes at which operations are measured."""

    m: tuple[int, ...]
    k: tuple[int, ...]
    n: tuple[int, ...]
    largest_flops: float
    """FLOP of the largest measured product; larger ones are extrapolated."""
    moved: tuple[int, ...]
    """Bytes that other operations move."""
    lengths: tuple[int, ...]
    """Tokens of attention."""
    updated: tuple[int, ...]
    """Bytes of updated parameters."""
    seconds: float
    """Time of one measurement."""
    passes: int
    """Repeats of all measurements; the best counts, because a disturbance of one pass is over by
    the next."""


ON_CPU = MeasuredSizes(
    m=(8, 16, 32, 128, 512, 2048),
    k=(16, 64, 256, 1024),
    n=(16, 64, 256, 1024),
    largest_flops=6e8,
    moved=(2**12, 2**15, 2**18, 2**20, 2**22, 2**24),
    lengths=(16, 64, 128, 256),
    updated=(2**12, 2**18, 2**21, 2**24),
    seconds=0.004,
    passes=2,
)
ON_GPU = MeasuredSizes(
    m=(64, 256, 1024, 4096, 16384),
    k=(64, 256, 1024, 4096, 16384),
    n=(64, 256, 1024, 4096),
    largest_flops=6e11,
    moved=(2**12, 2**18, 2**21, 2**23, 2**25, 2**27, 2**29),
    lengths=(64, 256, 1024, 2048),
    updated=(2**16, 2**22, 2**26, 2**29),
    seconds=0.002,
    passes=1,
)
TINY = MeasuredSizes(
    m=(8, 32),
    k=(16, 64),
    n=(16, 64),
    largest_flops=1e8,
    moved=(2**12, 2**16),
    lengths=(16, 32),
    updated=(2**12, 2**14),
    seconds=0.0005,
    passes=1,
)
