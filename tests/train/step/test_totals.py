"""Sums over micro-batches, and over workers of which one has no samples.

E counts the experts of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.loop.step_recorder import PendingStep, fetch_figures
from orchestrator.train.step.totals import Totals, TotalsReducer


def make_loss(scale: int = 1, count: Any = 4) -> Loss:
    return Loss(
        torch.tensor(1.5 * scale, requires_grad=True),
        count,
        {"correct": torch.tensor(3.0 * scale), "wrong": torch.tensor(1.0 * scale)},
        (torch.tensor([1, 0, 2]) * scale, torch.tensor([5, 6]) * scale),
    )


def make_totals(scale: int = 1) -> Totals:
    return Totals.from_loss(make_loss(scale), 1.0, samples=scale, copy=False)


def summary(totals: Totals) -> list[Any]:
    """All sums as plain numbers."""
    loads = [load_E.tolist() for load_E in totals.loads]
    metrics = {name: float(value) for name, value in totals.metrics.items()}
    return [float(totals.loss), float(totals.count), metrics, loads, totals.samples]


def pending(totals: Totals) -> PendingStep:
    totals.norm = torch.tensor(1.0)
    return PendingStep(step=0, epoch=0, lr=0.1, seconds=1.0, totals=totals)


def test_a_weight_scales_the_loss_and_nothing_else() -> None:
    loss = make_loss()
    plain = Totals.from_loss(loss, 1.0, 2, copy=False)
    assert summary(plain) == [1.5, 4.0, {"correct": 3.0, "wrong": 1.0}, [[1, 0, 2], [5, 6]], 2]
    assert not plain.loss.requires_grad
    assert plain.nominal_count == 1.0
    for weight in (2.0, 4.0):
        weighted = Totals.from_loss(loss, weight, 2, copy=False)
        assert summary(weighted) == [1.5 * weight, *summary(plain)[1:]]


@pytest.mark.parametrize("copy", [False, True])
def test_loads_are_copied_if_the_next_pass_overwrites_them(copy: bool) -> None:
    loss = make_loss()
    totals = Totals.from_loss(loss, 1.0, 1, copy)
    loss.loads[0].zero_()
    assert totals.loads[0].tolist() == ([1, 0, 2] if copy else [0, 0, 0])


def test_micro_batches_add_up() -> None:
    added = summary(make_totals(1).plus(make_totals(10)))
    assert added == [16.5, 8.0, {"correct": 33.0, "wrong": 11.0}, [[11, 0, 22], [55, 66]], 11]


@pytest.mark.parametrize("num_squares", [0, 2])
def test_one_process_keeps_its_own_sums(num_squares: int) -> None:
    reduce_totals = TotalsReducer(World.single_process(), "totals", num_squares)
    squares = torch.tensor([7.0, 8.0], dtype=torch.float64) if num_squares else None
    for scale in (1, 2):
        totals = make_totals(scale)
        totals.count = torch.tensor(4 * scale)
        votes = (0.0, float(scale == 2), 1.0)
        reduced = reduce_totals(totals, 9, votes, squares, (100.0, 200.0, 0.5))
        assert summary(reduced) == [*summary(totals)[:-1], 9]
        assert {load_E.dtype for load_E in reduced.loads} == {torch.int64}
        assert reduced.loss.dtype == torch.float64
        assert reduced.votes is not None
        assert tuple(reduced.votes.tolist()) == votes
        assert reduced.exchange_stats is not None
        assert reduced.exchange_stats.tolist() == [100.0, 200.0, 0.5]
        if squares is None:
            assert reduced.expert_grad_squares is None
        else:
            assert reduced.expert_grad_squares is not None
            assert reduced.expert_grad_squares.tolist() == [7.0, 8.0]


def test_a_loss_without_metrics_and_layers_is_reduced() -> None:
    totals = Totals.from_loss(Loss(torch.tensor(2.5), 3), 1.0, 1, copy=False)
    reduced = TotalsReducer(World.single_process(), "totals")(totals, 1)
    assert summary(reduced) == [2.5, 3.0, {}, [], 1]
    assert reduced.exchange_stats is not None
    assert reduced.exchange_stats.tolist() == [0.0, 0.0, 0.0]
    assert reduced.votes is not None
    assert reduced.votes.tolist() == [0.0, 0.0, 0.0]


def test_other_metrics_than_at_first_are_refused() -> None:
    reduce_totals = TotalsReducer(World.single_process(), "totals")
    reduce_totals(make_totals(), 1)
    other = Totals.from_loss(Loss(torch.tensor(1.0), 1, {"correct": torch.tensor(1.0)}), 1.0, 1, copy=False)
    answer = "has the metrics correct for a batch, and had correct, wrong for an earlier one"
    with pytest.raises(UserError, match=answer):
        reduce_totals(other, 1)
    with pytest.raises(UserError, match=answer):
        make_totals().plus(other)
    with pytest.raises(UserError, match="has the metrics correct, wrong for a batch, and had correct for"):
        other.plus(make_totals())
    with pytest.raises(UserError, match=answer):
        fetch_figures([pending(make_totals()), pending(other)])


def test_metrics_may_come_in_another_order() -> None:
    totals = make_totals()
    turned = make_totals(10)
    turned.metrics = dict(reversed(turned.metrics.items()))
    reduce_totals = TotalsReducer(World.single_process(), "totals")
    reduce_totals(totals, 1)
    assert summary(reduce_totals(turned, 10))[2] == {"correct": 30.0, "wrong": 10.0}
    assert summary(totals.plus(turned))[2] == {"correct": 33.0, "wrong": 11.0}


def reduce_on_rank(rank: int, size: int, store_path: str) -> list[Any]:
    """Rank 0 never has samples; rank 2 votes to stop, ranks 1 and 2 to save."""
    results: list[Any] = []
    store = file_store(store_path, size)
    with process_group_world(store, rank, size, torch.device("cpu"), "gloo", 60) as world:
        reduce_totals = TotalsReducer(world, "totals", num_squares=1)
        for scale in (1, 2**40):
            totals = make_totals(rank * scale) if rank else None
            squares = torch.tensor([float(rank)], dtype=torch.float64) if rank != 1 else None
            votes = (float(rank == 2), 0.0, float(rank > 0))
            reduced = reduce_totals(totals, 3, votes, squares, (1.0, rank, 0.25))
            assert reduced.votes is not None
            assert reduced.exchange_stats is not None
            assert reduced.expert_grad_squares is not None
            more = [*reduced.votes, *reduced.exchange_stats, *reduced.expert_grad_squares]
            results.append([*summary(reduced), [float(value) for value in more]])
    return results


def test_all_workers_get_the_sums_of_all() -> None:
    """Whole numbers stay exact where fp32 would round them."""
    expected = [
        [
            4.5 * scale,
            8.0,
            {"correct": 9.0 * scale, "wrong": 3.0 * scale},
            [[3 * scale, 0, 6 * scale], [15 * scale, 18 * scale]],
            3,
            [1.0, 0.0, 2.0, 3.0, 3.0, 0.75, 2.0],
        ]
        for scale in (1, 2**40)
    ]
    assert run_ranks(reduce_on_rank, 3) == [expected] * 3
