"""Times of single operations: wall-clock time on a CPU, device time on a GPU, with operands that
are rarely cached. The sizes at which they are measured, and the fit of costs to such times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from orchestrator.train.device.clock import synchronize, timed_seconds

_POOL_BYTES = {"cpu": 48 * 2**20, "cuda": 512 * 2**20}  # larger than caches
_MAX_OPERAND_SETS = 12
_ALIGNMENT = 64  # elements
_SHORTEST_S = 1e-7

# The GPU pauses while the host submits all calls, so that it never waits for the host between
# them.
_PAUSE_CYCLES = 300_000
_CYCLES_PER_S = 2e9

_HOST_CALLS = 40

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


class Timer:
    """Seconds of a call. On a GPU these are seconds of the device, which has all calls queued when
    it begins."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        """``seconds`` is the time to spend on one measurement."""
        self.device = device
        self._seconds = seconds
        self._pools: dict[torch.dtype, Tensor] = {}
        self._next_element = 0

    def random_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return random numbers from a new place of a pool that is larger than the caches.

        The operands of a step were rarely used just before. They are not zeros, with which a GPU
        is faster.
        """
        count = math.prod(shape)
        pool_size = _POOL_BYTES[self.device.type] // dtype.itemsize
        if count > pool_size:
            return torch.randn(shape, device=self.device).to(dtype)
        if dtype not in self._pools:
            self._pools[dtype] = torch.randn(pool_size, device=self.device).to(dtype)
        first = 0 if self._next_element + count > pool_size else self._next_element
        self._next_element = -(-(first + count) // _ALIGNMENT) * _ALIGNMENT
        return self._pools[dtype][first : first + count].view(shape)

    def time_with(
        self, make_operands: Callable[[], tuple[Tensor, ...]], compute: Callable[..., Any]
    ) -> float:
        """Return the seconds of ``compute`` over several sets of operands in turn."""
        sets = [make_operands()]
        set_bytes = sum(tensor.nbytes for tensor in sets[0])
        num_sets = min(_MAX_OPERAND_SETS, _POOL_BYTES[self.device.type] // max(1, set_bytes))
        sets += [make_operands() for _ in range(num_sets - 1)]
        next_set = cycle(sets)
        return self(lambda: compute(*next(next_set)))

    def __call__(self, call: Callable[[], Any]) -> float:
        return self._gpu_seconds(call) if self.device.type == "cuda" else self._cpu_seconds(call)

    def _cpu_seconds(self, call: Callable[[], Any]) -> float:
        call()
        once = _seconds_per_call(call, 1)
        calls = max(1, min(200, int(self._seconds / 5 / max(once, _SHORTEST_S))))
        if calls > 1:
            return statistics.median(_seconds_per_call(call, calls) for _ in range(5))
        # A long call: the first one counts too.
        rounds = max(1, min(4, int(self._seconds / max(once, _SHORTEST_S))))
        return statistics.median([*(_seconds_per_call(call, 1) for _ in range(rounds)), once])

    def _gpu_seconds(self, call: Callable[[], Any]) -> float:
        call()
        synchronize(self.device)
        submit_s = _seconds_per_call(call, 1)
        synchronize(self.device)
        once = self._queued_seconds(call, 1, submit_s)
        calls = max(2, min(30, int(self._seconds / max(once, _SHORTEST_S))))
        return self._queued_seconds(call, calls, submit_s)

    def _queued_seconds(self, call: Callable[[], Any], calls: int, submit_s: float) -> float:
        """Return the device seconds per call, with the calls queued behind a pause of the
        device."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(_PAUSE_CYCLES + 2 * _CYCLES_PER_S * submit_s * calls))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        synchronize(self.device)
        return begin.elapsed_time(end) / 1000 / calls

    def host_seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds until a call returns, whether or not a GPU has then finished it."""
        seconds = []
        for _ in range(_HOST_CALLS):
            synchronize(self.device)
            seconds.append(_seconds_per_call(call, 1))
        return statistics.median(seconds[_HOST_CALLS // 4 :])


def _seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    """Return the seconds until the host has made the calls, divided by their number."""

    def call_all() -> None:
        for _ in range(calls):
            call()

    return timed_seconds(call_all, None) / calls


def fit_nonnegative(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the coefficients of the columns, none below zero, with the least squares of relative
    errors."""
    scale = 1.0 / np.maximum(values, _SHORTEST_S)
    coefficients, _ = nnls(rows * scale[:, None], values * scale)
    return [float(value) for value in coefficients]
