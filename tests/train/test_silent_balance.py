"""Silent errors known from other MoE trainers: how the loads of experts are counted and balanced.

Each check passes, and fails when the error is planted in the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.moe.gate import Gate
from experts.moe.layer import MoELayer
from harness.faults.planted_faults import (
    SIZES,
    Plant,
    TrainingCase,
    fails_when_planted,
    merge_hosts,
    train_on_hosts,
    train_single_process,
)
from harness.runs.steppers import assert_gradients_equal
from harness.runs.tiny_model import Tiny
from orchestrator.errors import UserError
from orchestrator.train.step import update as step_module

# --- the balance loss is wrong under accumulation


def balance_each_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def by_own_counts(self: Gate, x_TD: Tensor, previous_E: Tensor, *rest: Any) -> Any:
        return real(self, x_TD, real(self, x_TD, previous_E, *rest).counts_E, *rest)

    patch.setattr(Gate, "forward", by_own_counts)


def assert_balance_does_not_depend_on_the_split(plant: Plant | None) -> None:
    case = TrainingCase(micro_batch=2, steps=3)
    expected = train_single_process(case, plant)
    hosts = train_on_hosts(case, plant)
    assert hosts[0].losses == pytest.approx(expected.losses, rel=1e-12), (
        "the loss depends on how the batch is split"
    )
    gradients = merge_hosts([host.gradients for host in hosts])
    assert_gradients_equal(gradients, expected.gradients, 1e-10, 1e-12)


def test_the_balance_loss_is_right_under_accumulation() -> None:
    fails_when_planted(
        assert_balance_does_not_depend_on_the_split,
        balance_each_micro_batch,
        "loss depends on how the batch is split",
    )


# --- recomputation counts the loads twice


def count_both_passes(patch: pytest.MonkeyPatch) -> None:
    real = MoELayer._route
    counts: dict[MoELayer, Tensor] = {}

    def route(self: MoELayer, x_TD: Tensor, first_dimension: int) -> Any:
        routing = real(self, x_TD, first_dimension)
        if self.context.replaying:
            counts[self].add_(routing.counts_E)
        else:
            counts[self] = routing.counts_E
        return routing

    patch.setattr(MoELayer, "_route", route)


def assert_loads_are_those_of_one_pass(plant: Plant | None) -> None:
    case = TrainingCase(Tiny((SIZES, SIZES)), micro_batch=4, steps=3, recompute=True)
    expected = train_single_process(case, plant)
    for host in train_on_hosts(case, plant):
        assert host.loads == expected.loads, "recomputation changes the loads"
        assert {sum(load) for load in host.loads[0]} == {case.global_batch * case.task.top_k}
        assert host.losses == pytest.approx(expected.losses, rel=1e-12)


def test_recomputation_counts_loads_once() -> None:
    fails_when_planted(
        assert_loads_are_those_of_one_pass, count_both_passes, "recomputation changes the loads"
    )


# --- an asynchronous balancer dies in silence; ours is a part of the step, on every host


def never_balance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_module, "update_balance", lambda model, loads, finite: None)


def balance_once(patch: pytest.MonkeyPatch) -> None:
    real = step_module.update_balance
    calls = count()

    def first_call_only(model: nn.Module, loads: Any, finite: Tensor | None) -> None:
        if next(calls) == 0:
            real(model, loads, finite)

    patch.setattr(step_module, "update_balance", first_call_only)


def assert_biases_move_in_every_step(plant: Plant | None) -> None:
    rate = 0.01
    case = TrainingCase(Tiny((SIZES, SIZES), options={"bias_rate": rate}), steps=4)
    for result in (train_single_process(case, plant), *train_on_hosts(case, plant)):
        expected = [torch.zeros(len(SIZES), dtype=torch.float64) for _ in case.task.sizes]
        for step, (loads, biases) in enumerate(zip(result.loads, result.biases, strict=True)):
            for layer, load in enumerate(loads):
                mean = sum(load) / len(load)
                expected[layer] += rate * torch.sign(mean - torch.tensor(load, dtype=torch.float64))
                assert torch.equal(biases[layer], expected[layer]), (
                    f"layer {layer} was not balanced after step {step}"
                )
        assert float(torch.stack(result.biases[-1]).abs().max()) > rate


def test_the_balancer_works_in_every_step() -> None:
    fails_when_planted(
        assert_biases_move_in_every_step, never_balance, "layer 0 was not balanced after step 0"
    )
    with pytest.raises(AssertionError, match="layer 0 was not balanced after step 1"):
        assert_biases_move_in_every_step(balance_once)


@dataclass(frozen=True)
class WithoutLoads(Tiny):
    """Has MoE layers, but its loss does not return their loads."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), loads=())


def test_a_task_that_returns_no_loads_is_refused() -> None:
    with pytest.raises(UserError, match="loads"):
        train_single_process(TrainingCase(WithoutLoads((SIZES,))))
