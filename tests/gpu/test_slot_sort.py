"""The counting sort of choices on a GPU against a stable sort of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.kernels.slot_sort import EVERY, count_choices, sort_choices
from experts.tokens.dispatch import sort_by_slot

pytestmark = pytest.mark.gpu
CASES = [  # tokens, choices, slots
    (1, 1, 1),
    (5, 2, 3),
    (129, 1, 130),
    (1000, 6, 64),
    (4096, 8, 128),
    (16384, 4, 32),
    (700, 3, 1024),
    (300_000, 2, 7),
]


def choices(tokens: int, top_k: int, num_slots: int, absent: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens)
    slots_TK = torch.randint(num_slots, (tokens, top_k), generator=generator, device="cuda")
    is_absent = torch.rand(tokens, top_k, generator=generator, device="cuda") < absent
    return slots_TK.masked_fill(is_absent, -1).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_those_of_a_stable_sort(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, top_k, num_slots = case
    slots_TK = choices(tokens, top_k, num_slots, 0.0, dtype)
    index_R, token_R, row_TK, counts_L = sort_choices(slots_TK, num_slots)
    expected_R = slots_TK.flatten().argsort(stable=True)
    assert torch.equal(index_R, expected_R)
    assert torch.equal(token_R, expected_R // top_k)
    assert torch.equal(row_TK.flatten()[index_R], torch.arange(tokens * top_k, device="cuda"))
    assert torch.equal(counts_L, torch.bincount(slots_TK.flatten(), minlength=num_slots))
    assert torch.equal(count_choices(slots_TK, num_slots), counts_L)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("more", [0, 40, -1])
def test_absent_choices_have_no_row(case: tuple[int, int, int], more: int) -> None:
    tokens, top_k, num_slots = case
    slots_TK = choices(tokens, top_k, num_slots, 0.4, torch.int64)
    present = int((slots_TK >= 0).sum())
    num_rows = max(0, present + more)
    index_R, token_R, row_TK, counts_L = sort_choices(slots_TK, num_slots, num_rows)
    flat = slots_TK.flatten()
    filled = min(present, num_rows)
    expected_R = torch.where(flat < 0, num_slots, flat).argsort(stable=True)[:filled]
    assert torch.equal(index_R[:filled], expected_R)
    assert not index_R[filled:].any()
    assert not token_R[filled:].any()
    inverse_R = torch.full_like(flat, -1)
    inverse_R[expected_R] = torch.arange(filled, device="cuda")
    assert torch.equal(row_TK.flatten(), inverse_R)
    assert torch.equal(counts_L, torch.bincount(flat[flat >= 0], minlength=num_slots))


@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("bounded", [False, True])
def test_trips_are_those_of_a_cpu(absent: float, bounded: bool) -> None:
    slots_TK = choices(1000, 6, 64, absent, torch.int64)
    weights_TK = torch.rand(1000, 6, device="cuda")
    present = int((slots_TK >= 0).sum())
    num_rows = None if not absent else present + 50 * bounded
    trips = []
    for device in ("cuda", "cpu"):
        leaf = weights_TK.detach().to(device, copy=True).requires_grad_()
        trip = sort_by_slot(slots_TK.to(device), leaf, 64, num_rows, bounded)
        rows = trip.weights_R[:present]
        (rows * torch.arange(present, device=device)).sum().backward()
        trips.append((rows, trip.counts_L, trip.row_map.token_R[:present], trip.row_map.row_TK, leaf.grad))
    for found, expected in zip(*trips, strict=True):
        assert torch.equal(found.cpu(), expected)


def test_the_host_does_not_wait() -> None:
    slots_TK = choices(1000, 6, 64, 0.0, torch.int64)
    sort_choices(slots_TK, 64, EVERY)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sort_choices(slots_TK, 64, EVERY)
        count_choices(slots_TK, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
