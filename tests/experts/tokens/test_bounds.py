"""Bounded rows: their bounds from step to step, and the checks of rows whose counts no host knew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.hosts.group import Group
from experts.moe.bank import ExpertBank
from experts.tokens.bounds import ExchangeBounds, RowBound, SeenRows, next_bound
from experts.tokens.destinations import Destinations
from experts.tokens.dispatch import sort_by_slot
from experts.tokens.received_rows import InvalidRows
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

CPU = torch.device("cpu")

# --- bounds


@pytest.mark.parametrize(
    ("before", "seen", "bound"),
    [
        (None, 1000, 1280),
        (None, 0, 64),
        (1280, 1280, 1280),
        (1280, 600, 1280),
        (1280, 1281, 1664),
        (1280, 100, 128),
    ],
)
def test_a_bound_has_slack_and_stays_where_it_is_near(before: int | None, seen: int, bound: int) -> None:
    earlier = None if before is None else RowBound(before, before)
    found = next_bound(earlier, SeenRows(seen, 2 * seen, seen), num_hosts=2)
    assert found == RowBound(bound, bound)


def test_rows_stay_counted_where_padding_would_more_than_double_them() -> None:
    """One host has nearly all experts: the bound of its rows would be that of all others."""
    assert next_bound(None, SeenRows(rows=4000, received=30_000, expert_rows=1), num_hosts=8) is not None
    assert next_bound(None, SeenRows(rows=4000, received=18_000, expert_rows=1), num_hosts=8) is None
    assert next_bound(None, SeenRows(rows=10, received=10, expert_rows=1), num_hosts=8) is not None


# --- rows of a host


def test_rows_are_in_blocks_and_padding_is_for_no_expert() -> None:
    host_TK = torch.tensor([[1, 0], [1, 1], [2, -1], [1, 2]])
    experts_TK = torch.tensor([[5, 1], [4, 5], [8, 9], [5, 8]])
    plan, ids_SK = Destinations.of(host_TK, 3).bounded_plan(experts_TK, RowBound(2, 9))
    # Of three rows for host 1 the last, of token 3, is beyond the bound. A block ends with the header.
    assert plan.row_map.token_R.tolist() == [0, 0, 0, 0, 1, 0, 2, 3, 0]
    wanted = [[-1, 1], [-1, -1], [-1, -1], [5, -1], [4, 5], [-1, -1], [8, -1], [-1, 8], [-1, -1]]
    assert ids_SK.tolist() == wanted
    assert [sorted(row) for row in plan.row_map.row_TK.tolist()] == [[0, 3], [-1, 4], [-1, 6], [-1, 7]]


@pytest.mark.parametrize("max_rows", [6, 5, 3])
def test_bounded_rows_are_the_first_of_all_rows(max_rows: int) -> None:
    slots_TK = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]])
    weights_TK = torch.arange(8.0).view(4, 2)
    exact = sort_by_slot(slots_TK, weights_TK, 3, 5)
    trip = sort_by_slot(slots_TK, weights_TK, 3, max_rows, bounded=True)
    num_rows = min(5, max_rows)
    assert trip.counts_L.tolist() == [2, 0, num_rows - 2]
    assert trip.weights_R[:num_rows].tolist() == exact.weights_R[:num_rows].tolist()
    assert trip.row_map.token_R[:num_rows].tolist() == exact.row_map.token_R[:num_rows].tolist()
    exact_rows = exact.row_map.row_TK
    assert torch.equal(trip.row_map.row_TK, torch.where(exact_rows < num_rows, exact_rows, -1))


def test_a_bank_on_a_cpu_does_not_fuse() -> None:
    assert not ExpertBank(64, [64, 64]).fuses(torch.zeros(3, 64), 10)


# --- checks


def headers(*rows: tuple[int, int, int, int]) -> Tensor:
    return torch.tensor(rows)


RIGHT = {
    "received": headers((7, 3, 2, 2), (7, 3, 1, 2)),
    "ids": torch.tensor([[1, -1], [-1, 1], [1, 1], [-1, -1]]),
}
WRONG = {
    "another step": (RIGHT | {"received": headers((7, 3, 2, 2), (6, 3, 1, 2))}, "out of step"),
    "another layer": (RIGHT | {"received": headers((7, 3, 2, 2), (7, 4, 1, 2))}, "out of step"),
    "another host's expert": (
        RIGHT | {"ids": torch.tensor([[1, -1], [-1, 1], [1, 0], [-1, -1]])},
        "1 experts that the host does not have",
    ),
    "a lost choice": (
        RIGHT | {"ids": torch.tensor([[1, -1], [-1, 1], [1, -1], [-1, -1]])},
        "another number of experts",
    ),
}


def end_attempt(
    rank: int, size: int, store: str, received_N4: Tensor, ids_GK: Tensor, rows: int
) -> bool | str:
    """Check rows of one host on two: the other one's are right."""
    bounds = ExchangeBounds(CPU)
    bounds.begin_attempt()
    slots_GK = torch.where(ids_GK == 1, 0, -1)
    if rank == 1:
        received_N4, ids_GK, slots_GK = RIGHT["received"], RIGHT["ids"], torch.where(RIGHT["ids"] == 1, 0, -1)
    sent_N4 = headers((7, 3, 0, 0), (7, 3, 0, 0))
    bounds.add_headers(3, RowBound(rows, 100), received_N4, sent_N4, (ids_GK, slots_GK))
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        assert isinstance(world.group, Group)
        try:
            return bounds.end_attempt(world.group)
        except InvalidRows as error:
            return str(error)


def test_right_rows_pass_and_rows_beyond_a_bound_are_told_to_all_hosts() -> None:
    assert run_ranks(end_attempt, 2, RIGHT["received"], RIGHT["ids"], 2) == [True, True]
    assert run_ranks(end_attempt, 2, RIGHT["received"], RIGHT["ids"], 1) == [False, False]


@pytest.mark.parametrize("name", WRONG)
def test_damaged_rows_are_an_error_on_all_hosts(name: str) -> None:
    case, message = WRONG[name]
    for found in run_ranks(end_attempt, 2, case["received"], case["ids"], 2):
        assert isinstance(found, str)
        assert found.startswith("layer 3: a host received rows that name ")
        assert message in found
