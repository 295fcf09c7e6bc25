"""Dispatch and combine against a loop over tokens and choices, in the order of slots.

T counts tokens, K choices per token, D is the width, L counts local slots, R rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.tokens.dispatch import dispatch, key_dtype, sum_rows

WIDTH = 3


def make_choices(num_slots: int, tokens: int, top_k: int, absent: float) -> Tensor:
    """Different slots for each token, all slots in use, and some choices absent."""
    generator = torch.Generator().manual_seed(num_slots)
    first_T1 = torch.randint(num_slots, (tokens, 1), generator=generator)
    slots_TK = (first_T1 + torch.arange(top_k) * (num_slots // top_k)) % num_slots
    is_absent_TK = torch.rand(tokens, top_k, generator=generator) < absent
    # The first tokens use all slots but at most one, and keep all their choices.
    num_full = num_slots // top_k
    slots_TK[:num_full] = torch.arange(num_full * top_k).view(-1, top_k)
    is_absent_TK[:num_full] = False
    return slots_TK.masked_fill(is_absent_TK, -1)


def sorted_choices(slots_TK: Tensor) -> list[tuple[int, int, int]]:
    """(slot, token, choice) of each choice that is not absent, sorted."""
    choices: list[tuple[int, int, int]] = []
    for token, slots in enumerate(slots_TK.tolist()):
        choices += [(slot, token, choice) for choice, slot in enumerate(slots) if slot >= 0]
    return sorted(choices)


@pytest.mark.parametrize(
    ("num_slots", "dtype"),
    [
        (1, torch.uint8),
        (255, torch.uint8),
        (256, torch.int16),
        (2**15 - 1, torch.int16),
        (2**15, torch.int64),
    ],
)
def test_the_sort_key_is_the_shortest_that_holds_the_key_of_absent_choices(
    num_slots: int, dtype: torch.dtype
) -> None:
    """That key is the number of slots: 255 is the largest of 8 bits, 2**15 - 1 of 16 bits with a
    sign."""
    assert key_dtype(num_slots) == dtype


@pytest.mark.parametrize("num_slots", [1, 2, 100, 254, 255, 256, 257, 2**15 - 2, 2**15 - 1, 2**15, 2**15 + 1])
@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
def test_rows_are_sorted_by_slot_at_any_number_of_slots(num_slots: int, absent: float) -> None:
    """Around 2**8 and 2**15 slots the type of the sort key changes, and the key of absent choices
    must still fit."""
    top_k = min(2, num_slots)
    tokens = num_slots // top_k + 40
    slots_TK = make_choices(num_slots, tokens, top_k, absent)
    x_TD = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weights_TK = torch.rand(tokens, top_k, dtype=torch.float64)
    expected = sorted_choices(slots_TK)
    num_rows = len(expected) if absent else None
    rows_RD, trip = dispatch(x_TD, slots_TK, weights_TK, num_slots, num_rows)
    slot_R, token_R, choice_R = (torch.tensor(column) for column in zip(*expected, strict=True))
    assert torch.equal(trip.counts_L, torch.bincount(slot_R, minlength=num_slots))
    assert torch.equal(trip.row_map.token_R, token_R)
    assert torch.equal(rows_RD, x_TD[token_R])
    assert torch.equal(trip.weights_R, weights_TK[token_R, choice_R])
    row_TK = torch.full((tokens, top_k), -1)
    row_TK[token_R, choice_R] = torch.arange(len(expected))
    assert torch.equal(trip.row_map.row_TK, row_TK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absent", [0.0, 0.4])
def test_combine_sums_the_rows_of_each_token(dtype: torch.dtype, absent: float) -> None:
    """Forward and backward; a token without any row gets zeros."""
    num_slots, tokens, top_k = 7, 30, 3
    slots_TK = make_choices(num_slots, tokens, top_k, absent)
    slots_TK[-1] = slots_TK[-1] if not absent else -1
    x_TD = torch.randint(-8, 9, (tokens, WIDTH)).to(dtype).requires_grad_()
    weights_TK = torch.ones(tokens, top_k, dtype=dtype)
    num_rows = int((slots_TK >= 0).sum()) if absent else None
    rows_RD, trip = dispatch(x_TD, slots_TK, weights_TK, num_slots, num_rows)
    rows_RD.retain_grad()
    y_TD = sum_rows(rows_RD, trip.row_map)
    copies_T1 = (slots_TK >= 0).sum(1, keepdim=True).to(dtype)
    assert torch.equal(y_TD, x_TD * copies_T1)
    upstream_TD = torch.randint(-8, 9, (tokens, WIDTH)).to(dtype)
    y_TD.backward(upstream_TD)
    assert rows_RD.grad is not None
    assert torch.equal(rows_RD.grad, upstream_TD[trip.row_map.token_R])
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, upstream_TD * copies_T1)


def test_the_gradient_of_a_weight_comes_from_its_row() -> None:
    slots_TK = torch.tensor([[2, -1], [0, 2], [-1, -1]])
    weights_TK = torch.rand(3, 2, requires_grad=True)
    _, trip = dispatch(torch.zeros(3, WIDTH), slots_TK, weights_TK, 3, 3)
    trip.weights_R.backward(torch.tensor([10.0, 20.0, 30.0]))
    assert weights_TK.grad is not None
    assert weights_TK.grad.tolist() == [[20.0, 0.0], [10.0, 30.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_without_rows_is_zero_next_to_rows_of_nan(dtype: torch.dtype) -> None:
    slots_TK = torch.tensor([[0, 1], [-1, -1], [-1, 0]])
    _, trip = dispatch(torch.zeros(3, WIDTH, dtype=dtype), slots_TK, torch.ones(3, 2, dtype=dtype), 2, 3)
    rows_RD = torch.full((3, WIDTH), torch.nan, dtype=dtype)
    rows_RD[1] = 2.0
    y_TD = sum_rows(rows_RD, trip.row_map)
    assert y_TD[0].isnan().all()
    assert torch.equal(y_TD[1:], torch.tensor([[0.0], [2.0]], dtype=dtype).expand(2, WIDTH))


def test_short_types_are_summed_in_fp32() -> None:
    """256 + 1 is 256 in bf16: added one after another in that type, the small rows would vanish."""
    slots_TK = torch.tensor([[0, 1, 2]])
    _, trip = dispatch(torch.zeros(1, WIDTH), slots_TK, torch.ones(1, 3), 3)
    rows_RD = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).unsqueeze(1).expand(3, WIDTH)
    assert torch.equal(sum_rows(rows_RD, trip.row_map), torch.full((1, WIDTH), 258.0, dtype=torch.bfloat16))
