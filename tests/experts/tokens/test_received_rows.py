"""Rows of any content from other hosts: no id is an index before it is bounded, and the host learns
of wrong ones where it waits for the device anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experts.hosts.membership import GroupLeft
from experts.moe.context import RecomputeCache
from experts.tokens.received_rows import InvalidRows, RowCheck, local_slots
from harness.moe.damaged_rows import DamagingExchange, compute_layer, make_layer

SIZES = [8, 8, 4, 8, 4, 8, 8]
Kernel = Literal["loop", "grouped"]
KERNELS: list[Kernel] = ["loop", "grouped"]


# --- ids


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_only_held_experts_have_a_slot(ids: list[int]) -> None:
    slot_E = torch.tensor([-1, 1, 0, -1])
    slots = local_slots(torch.tensor(ids, dtype=torch.int64).view(-1, 1), slot_E)
    assert slots.reshape(-1).tolist() == [{1: 1, 2: 0}.get(expert, -1) for expert in ids]


def check_of(ids: Sequence[Sequence[int]], counts: Sequence[int], num_choices: int) -> RowCheck:
    """A check on a host that has expert 1 of 3."""
    ids_GK = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    slots_GK = local_slots(ids_GK, torch.tensor([-1, 0, -1]))
    return RowCheck.start("blocks.0", ids_GK, slots_GK, counts, num_choices)


def test_right_rows_pass() -> None:
    check_of([[1, -1], [-1, 1], [1, 1]], [2, 0, 1], 4).finish()
    check_of([], [0, 0, 0], 0).finish()


@pytest.mark.parametrize("wrong", [3, 2**31 - 1, -2, -(2**31), 0], ids=str)
@pytest.mark.parametrize(("row", "host"), [(0, 0), (1, 0), (2, 2)])
def test_the_error_names_layer_and_host(wrong: int, row: int, host: int) -> None:
    """An id out of range, and one of an expert that is elsewhere."""
    ids = [[1, -1], [-1, 1], [1, 1]]
    ids[row][1] = wrong
    with pytest.raises(InvalidRows, match=f"layer blocks.0: row {row} of 3, from host {host}, names"):
        check_of(ids, [2, 0, 1], 4).finish()


def test_a_wrong_number_of_choices_is_an_error() -> None:
    """A buffer of zeros names expert 0, which may be one of this host's."""
    message = r"layer blocks.0: the rows from hosts \[0, 2\] name 3 experts of this host; 4 were announced"
    with pytest.raises(InvalidRows, match=message):
        check_of([[1, -1], [-1, 1], [1, -1]], [2, 0, 1], 4).finish()


# --- the layer


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([1, 7, 40]),
    kernel=st.sampled_from(KERNELS),
    hosts=st.sampled_from([2, 3, 9]),
)
def test_a_layer_survives_rows_of_random_bits(seed: int, tokens: int, kernel: Kernel, hosts: int) -> None:
    """Forward and backward; the next exchange of counts raises."""
    layer = make_layer(DamagingExchange(hosts, seed), SIZES, kernel)
    x_TD = compute_layer(layer, tokens)
    assert x_TD.grad is not None
    assert x_TD.grad.shape == x_TD.shape
    with pytest.raises(InvalidRows, match="layer moe: row 0 of"):
        layer(x_TD.detach())


@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [SIZES, [8] * 4], ids=str)
def test_a_layer_survives_rows_of_one_byte(fill: int, kernel: Kernel, sizes: list[int]) -> None:
    """Zeros name expert 0 for every choice, 255 names none: more and fewer than announced."""
    layer = make_layer(DamagingExchange(3, fill=fill), sizes, kernel)
    compute_layer(layer, 20)
    with pytest.raises(InvalidRows, match="layer moe"):
        layer.context.finish_row_checks()
    layer.context.finish_row_checks()  # an error is reported once


def test_a_group_that_was_left_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong rows are to be expected then."""
    exchange = DamagingExchange(3)
    layer = make_layer(exchange, SIZES, "loop")
    x_TD = compute_layer(layer, 5)

    def left(counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        raise GroupLeft("the group was left")

    monkeypatch.setattr(exchange, "all_to_all_counts", left)
    with pytest.raises(GroupLeft):
        layer(x_TD.detach())


def test_a_recomputed_pass_checks_nothing_twice() -> None:
    layer = make_layer(DamagingExchange(3), SIZES, "loop")
    x_TD = torch.randn(5, 8)
    cache = RecomputeCache()
    with cache.recording(layer.context):
        layer(x_TD)
    assert len(layer.context.row_checks) == 1
    with cache.replaying(layer.context):
        layer(x_TD)
    assert len(layer.context.row_checks) == 1


# --- counts


@pytest.mark.parametrize(
    ("rows", "choices"), [(-1, 0), (3, 2), (3, 7), (0, 1), (2**40, 1)], ids=lambda value: str(value)
)
def test_impossible_counts_are_refused_before_rows_are_received(
    rows: int, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = DamagingExchange(3)
    layer = make_layer(exchange, SIZES, "loop")
    monkeypatch.setattr(
        exchange, "all_to_all_counts", lambda *_: torch.tensor([[0, 0], [rows, choices], [0, 0]])
    )
    monkeypatch.setattr(exchange, "all_to_all_rows", lambda *_: pytest.fail("rows are exchanged"))
    with pytest.raises(RuntimeError, match=f"host 1 announced {rows} rows for {choices} choices"):
        layer(torch.randn(5, 8))
