"""Times single operations: on a CPU by the clock, on a GPU by the device's own, with operands that are seldom in a cache."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_POOL_BYTES = {"cpu": 48 * 2**20, "cuda": 512 * 2**20}
_MOST_SETS = 12
_PAUSE_CYCLES, _CYCLES_PER_S = (
    300_000,
    2e9,
)  # a pause of the GPU, in which the host hands it all that is timed
_HANDED_OVER = 40


class Timer:
    """Seconds of a call: on a GPU those of the device, which has all calls before it begins with the first."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self._seconds = device, seconds
        self._pools: dict[torch.dtype, Tensor] = {}
        self._place = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random numbers of this shape, each time from another place of a pool that is larger than caches are: what a step
        computes with was seldom used just before. Not zeros, which a GPU is faster with."""
        count, whole = math.prod(shape), _POOL_BYTES[self.device.type] // dtype.itemsize
        if count > whole:
            return torch.randn(shape, device=self.device).to(dtype)
        if dtype not in self._pools:
            self._pools[dtype] = torch.randn(whole, device=self.device).to(dtype)
        begin = 0 if self._place + count > whole else self._place
        self._place = -(-(begin + count) // 64) * 64
        return self._pools[dtype][begin : begin + count].view(shape)

    def in_turn(self, make: Callable[[], tuple[Tensor, ...]], compute: Callable[..., Any]) -> float:
        """Seconds of ``compute`` over several sets of what ``make`` makes."""
        sets = [make()]
        size = sum(tensor.nbytes for tensor in sets[0])
        sets += [make() for _ in range(min(_MOST_SETS, _POOL_BYTES[self.device.type] // max(1, size)) - 1)]
        turn = cycle(sets)
        return self(lambda: compute(*next(turn)))

    def __call__(self, call: Callable[[], Any]) -> float:
        return self._on_gpu(call) if self.device.type == "cuda" else self._on_cpu(call)

    def _on_cpu(self, call: Callable[[], Any]) -> float:
        call()
        once = _lasted(call, 1)
        times = max(1, min(200, int(self._seconds / 5 / max(once, 1e-7))))
        rounds = 5 if times > 1 else max(1, min(4, int(self._seconds / max(once, 1e-7))))
        return statistics.median(
            [*(_lasted(call, times) for _ in range(rounds)), *([once] if times == 1 else [])]
        )

    def _on_gpu(self, call: Callable[[], Any]) -> float:
        call()
        torch.cuda.synchronize(self.device)
        issuing = _lasted(call, 1)
        torch.cuda.synchronize(self.device)
        once = self._queued(call, 1, issuing)
        return self._queued(call, max(2, min(30, int(self._seconds / max(once, 1e-7)))), issuing)

    def _queued(self, call: Callable[[], Any], times: int, issuing: float) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(_PAUSE_CYCLES + 2 * _CYCLES_PER_S * issuing * times))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1000 / times

    def host(self, call: Callable[[], Any]) -> float:
        """Seconds until a call returns, whether or not a GPU has then done what it was asked for."""
        seconds = []
        for _ in range(_HANDED_OVER):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(_lasted(call, 1))
        return statistics.median(seconds[_HANDED_OVER // 4 :])


def _lasted(call: Callable[[], Any], times: int) -> float:
    begun = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - begun) / times
