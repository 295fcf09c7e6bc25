"""Latency and bandwidth of the links between workers, measured with all-reduces and all-to-alls of
several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.measure.calibration.timer import fit_nonnegative
from orchestrator.plan.cost.machine import Interconnect, Link, LinkKind
from orchestrator.train.device.clock import synchronize, timed_seconds
from orchestrator.train.group.world import World

_MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**23)
_LARGE_BYTES = 2**20
_SMALL_REPEATS = 40
_LARGE_REPEATS = 12
_WARM_UP = 4


def measured_links(world: World, kind: LinkKind) -> Interconnect:
    """Return the links between the workers; all of them must call it.

    The size of an all-to-all counts the bytes that leave a device: for two workers, half of the
    tensor.
    """
    group = world.axis("data")

    def all_reduce(tensor: Tensor) -> None:
        world.all_reduce(tensor)

    def all_to_all(tensor: Tensor) -> None:
        group.all_to_all(torch.empty_like(tensor), tensor, [], []).wait()

    sums = {size: _message_seconds(world, all_reduce, size) for size in _MESSAGE_BYTES}
    exchanges = {
        size: _message_seconds(world, all_to_all, size * world.size // (world.size - 1))
        for size in _MESSAGE_BYTES
    }
    return Interconnect(fit_link(kind, sums), fit_link(kind, exchanges))


def _message_seconds(world: World, send: Callable[[Tensor], Any], size_bytes: int) -> float:
    """Return the mean over messages and workers, with some computation before each message.

    In a step no worker waits for the message to come, and on a CPU the thread that carries a
    message first needs a core.
    """
    tensor = torch.zeros(size_bytes // 4, device=world.device)
    square = torch.randn(192, 192, device=world.device)
    seconds = []
    for _ in range(_SMALL_REPEATS if size_bytes < _LARGE_BYTES else _LARGE_REPEATS):
        for _ in range(4):
            square = (square @ square).clamp(-1, 1)
        synchronize(world.device)
        seconds.append(timed_seconds(lambda: send(tensor), world.device))
    own_mean = statistics.mean(seconds[_WARM_UP:])
    return statistics.mean(world.gather_values(own_mean))


def fit_link(kind: LinkKind, seconds: Mapping[int, float]) -> Link:
    """Return the link whose latency and bandwidth explain the seconds by message size best."""
    sizes = np.array(list(seconds), float)
    values = np.array(list(seconds.values()))
    latency_s, seconds_per_byte = fit_nonnegative(np.stack([np.ones_like(sizes), sizes], 1), values)
    return Link(kind, latency_s, 1.0 / max(seconds_per_byte, 1e-13))
