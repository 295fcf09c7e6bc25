"""Digests of a run's state: equal to a sum in plain Python, and changed by each flipped bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from orchestrator.train.checkpoint import digests
from orchestrator.train.checkpoint.digests import COLUMNS, digests_of

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
SHAPES = ((1, 1), (3, 7), (2, 5, 3), (4, 1, 2), (1, COLUMNS), (2, COLUMNS + 1), (3, 2 * COLUMNS - 1))


def splitmix(number: int, salt: int) -> int:
    z = (number + (salt << 32)) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31) | 1


def oracle(tensor: Tensor) -> int:
    """Sum the bits of each element, times its odd number, in Python's integers."""
    size = tensor.element_size()
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    total = 0
    for place in range(tensor.numel()):
        bits = int.from_bytes(data[place * size : (place + 1) * size], "little", signed=True)
        odd = splitmix(place // COLUMNS + 1, 2) * splitmix(place % COLUMNS + 1, 1)
        total += bits * odd
    return total % 2**64


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    size = torch.empty((), dtype=dtype).element_size()
    data = torch.randint(256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_digest_is_the_sum_of_bits_times_odd_numbers(shape: tuple[int, ...], dtype: torch.dtype):
    stack = drawn(shape, dtype)
    found = [digest % 2**64 for digest in digests_of(stack).tolist()]
    assert found == [oracle(tensor) for tensor in stack]


def test_pieces_of_a_large_stack_add_up(monkeypatch: pytest.MonkeyPatch):
    stack = drawn((5, 3 * COLUMNS + 2), torch.float32)
    expected = [oracle(tensor) for tensor in stack]
    for at_once in (COLUMNS, 2 * COLUMNS, 7 * COLUMNS, 100 * COLUMNS):
        monkeypatch.setitem(digests._MAX_AT_ONCE, "cpu", at_once)
        assert [digest % 2**64 for digest in digests_of(stack).tolist()] == expected, at_once


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype):
    draw = random.Random(0)
    tensor = drawn((1, 40), dtype)
    before = digests_of(tensor)
    data = tensor.view(torch.uint8).flatten()
    for bit in range(data.numel() * 8):
        place, mask = bit // 8, 1 << bit % 8
        data[place] ^= mask
        assert not torch.equal(digests_of(tensor), before), f"bit {bit}"
        data[place] ^= mask
    assert torch.equal(digests_of(tensor), before)
    large = drawn((1, 4 * COLUMNS), torch.float32)
    before = digests_of(large)
    for _ in range(50):
        place, mask = draw.randrange(large.numel() * 4), 1 << draw.randrange(8)
        large.view(torch.uint8).flatten()[place] ^= mask
        assert not torch.equal(digests_of(large), before)
        large.view(torch.uint8).flatten()[place] ^= mask


def test_a_digest_follows_the_places_of_elements():
    tensor = drawn((1, 10), torch.float32)
    swapped = tensor[:, torch.tensor([1, 0, *range(2, 10)])]
    assert not torch.equal(digests_of(tensor), digests_of(swapped))
    by_columns = tensor.view(2, 5).t().contiguous().t()
    assert torch.equal(digests_of(by_columns.unsqueeze(0)), digests_of(tensor)), "the layout in memory shows"
