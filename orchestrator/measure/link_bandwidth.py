"""What workers carry to each other, measured: sums and exchanges of several sizes, as latency and bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experts.group import Group
from orchestrator.measure.fit import fitted_link
from orchestrator.plan.cost.machine import Interconnect, LinkKind
from orchestrator.train.parts.world import World

_MESSAGES = (2**10, 2**14, 2**17, 2**20, 2**23)


def measured_links(world: World, kind: LinkKind) -> Interconnect:
    """Called by all workers at once. An exchange counts by the bytes that leave a device: of a tensor for two, half."""
    group = Group(world.rank, world.size, world.process_group)

    def swap(tensor: Tensor) -> None:
        group.all_to_all(torch.empty_like(tensor), tensor, [], []).wait()

    sums = {size: _message_seconds(world, lambda t: world.all_reduce(t), size) for size in _MESSAGES}
    swaps = {size: _message_seconds(world, swap, size * world.size // (world.size - 1)) for size in _MESSAGES}
    return Interconnect(fitted_link(kind, sums), fitted_link(kind, swaps))


def _message_seconds(world: World, send: Callable[[Tensor], Any], size: int) -> float:
    """The mean, over messages and workers, with something to compute before each: in a step nobody waits at the door, and on a
    CPU the thread that carries a message must first get hold of a core."""
    tensor, square = torch.zeros(size // 4, device=world.device), torch.randn(192, 192, device=world.device)
    seconds = []
    for _ in range(40 if size < 2**20 else 12):
        for _ in range(4):
            square = (square @ square).clamp(-1, 1)
        _wait(world.device)
        begun = perf_counter()
        send(tensor)
        _wait(world.device)
        seconds.append(perf_counter() - begun)
    return statistics.mean(row[0] for row in world.gather([statistics.mean(seconds[4:])]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
