"""Data of the task: numbers and whether they are in order."""

import torch

from orchestrator import TensorData


def sequences(count: int, seed: int) -> TensorData:
    """Return short sequences of numbers; half of them are sorted.

    The generator has a seed of its own: all workers see the same samples.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 6, generator=generator)
    is_sorted = torch.rand(count, generator=generator) < 0.5
    numbers = torch.where(is_sorted[:, None], numbers.sort(dim=1).values, numbers)
    return TensorData(numbers, is_sorted.long())
