"""Silent errors of other MoE trainers, one test each, as in the table in ``facts.md``: how the experts' loads are counted and balanced.
Each check fails where its error is planted in our own code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.gate import Gate
from experts.layer import MoELayer
from orchestrator.errors import UserError
from orchestrator.train import step as stepping
from tests.support.planted_faults import (
    SIZES,
    Plant,
    TrainingCase,
    fails_when_planted,
    merge_hosts,
    train_on_hosts,
    train_single_process,
)
from tests.support.steppers import assert_gradients_equal
from tests.support.tiny_model import Tiny

# Balance loss wrong under accumulation.


def balances_each_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def by_itself(self: Gate, x_TD: Tensor, previous_E: Tensor, *rest: Any) -> Any:
        return real(self, x_TD, real(self, x_TD, previous_E, *rest).counts_E, *rest)

    patch.setattr(Gate, "forward", by_itself)


def balance_does_not_depend_on_the_cut(plant: Plant | None) -> None:
    case = TrainingCase(micro_batch=2, steps=3)
    expected, hosts = train_single_process(case, plant), train_on_hosts(case, plant)
    assert hosts[0].losses == pytest.approx(expected.losses, rel=1e-12), (
        "the loss depends on how the batch is cut"
    )
    assert_gradients_equal(merge_hosts([host.gradients for host in hosts]), expected.gradients, 1e-10, 1e-12)


def test_balance_loss_wrong_under_accumulation() -> None:
    fails_when_planted(
        balance_does_not_depend_on_the_cut, balances_each_micro_batch, "loss depends on how the batch is cut"
    )


# Recomputation counts expert loads twice.


def counts_both_passes(patch: pytest.MonkeyPatch) -> None:
    real, counted = MoELayer._route, {}

    def route(self: MoELayer, x_TD: Tensor, samples: int) -> Any:
        routing = real(self, x_TD, samples)
        if self.context.replaying:
            counted[self].add_(routing.counts_E)
        else:
            counted[self] = routing.counts_E
        return routing

    patch.setattr(MoELayer, "_route", route)


def loads_are_those_of_one_pass(plant: Plant | None) -> None:
    case = TrainingCase(Tiny((SIZES, SIZES)), micro_batch=4, steps=3, recompute=True)
    expected, hosts = train_single_process(case, plant), train_on_hosts(case, plant)
    for host in hosts:
        assert host.loads == expected.loads, "recomputation changes the loads"
        assert {sum(load) for load in host.loads[0]} == {case.global_batch * case.task.top_k}
        assert host.losses == pytest.approx(expected.losses, rel=1e-12)


def test_recomputation_counts_expert_loads_twice() -> None:
    fails_when_planted(loads_are_those_of_one_pass, counts_both_passes, "recomputation changes the loads")


# Asynchronous balancer dead without a word. Ours is a part of the step, on every host.


def never_settles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stepping, "update_balance", lambda model, loads: None)


def settles_once(patch: pytest.MonkeyPatch) -> None:
    real, calls = stepping.update_balance, count()
    patch.setattr(
        stepping, "update_balance", lambda model, loads: None if next(calls) else real(model, loads)
    )


def biases_move_at_every_step(plant: Plant | None) -> None:
    rate = 0.01
    case = TrainingCase(Tiny((SIZES, SIZES), options={"bias_rate": rate}), steps=4)
    for host in (train_single_process(case, plant), *train_on_hosts(case, plant)):
        expected = [torch.zeros(len(SIZES), dtype=torch.float64) for _ in case.task.sizes]
        for step, (loads, biases) in enumerate(zip(host.loads, host.biases, strict=True)):
            for layer, load in enumerate(loads):
                even = sum(load) / len(load)
                expected[layer] += rate * torch.sign(even - torch.tensor(load, dtype=torch.float64))
                assert torch.equal(biases[layer], expected[layer]), (
                    f"layer {layer} was not balanced after step {step}"
                )
        assert float(torch.stack(host.biases[-1]).abs().max()) > rate


def test_asynchronous_balancer_dead_without_a_word() -> None:
    fails_when_planted(biases_move_at_every_step, never_settles, "layer 0 was not balanced after step 0")
    with pytest.raises(AssertionError, match="layer 0 was not balanced after step 1"):
        biases_move_at_every_step(settles_once)


@dataclass(frozen=True)
class Untold(Tiny):
    """Trains MoE layers, and does not say how their experts were used."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), loads=())


def test_a_task_that_tells_no_loads_is_refused() -> None:
    with pytest.raises(UserError, match="loads"):
        train_single_process(TrainingCase(Untold((SIZES,))))
