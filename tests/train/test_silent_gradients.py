"""Silent errors known from other MoE trainers: gradients and their norm.

Each check passes, and fails when the error is planted in the code under test, on hosts and in the one
process that they are compared with alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.moe.gate import Gate
from harness.faults.planted_faults import (
    HOSTS,
    SIZES,
    Plant,
    TrainingCase,
    by_expert,
    fails_when_planted,
    merge_hosts,
    total_norm,
    train_on_host,
    train_on_hosts,
    train_single_process,
)
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import assert_gradients_equal
from harness.runs.tiny_model import Tiny
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy

# --- the norm is averaged over ranks that own different experts


def average_norms(patch: pytest.MonkeyPatch) -> None:
    def averaged(self: ExpertParallelStrategy, gradients: list[Tensor], _: Tensor | None) -> Tensor:
        return self.world.all_reduce(norm_of_gradients(gradients)) / self.world.size

    patch.setattr(ExpertParallelStrategy, "gradient_norm", averaged)


def assert_norms_equal_one_process(plant: Plant | None) -> None:
    case = TrainingCase(steps=3, clip_norm=0.5)
    expected = train_single_process(case, plant).norms
    for host in train_on_hosts(case, plant):
        assert host.norms == pytest.approx(expected, rel=1e-12), "the gradient norm differs on hosts"


def test_the_gradient_norm_on_hosts_is_that_of_one_process() -> None:
    fails_when_planted(assert_norms_equal_one_process, average_norms, "gradient norm differs on hosts")


# --- each expert group clips by its own norm


def clip_by_own_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ExpertParallelStrategy, "gradient_norm", lambda _, gradients, __: norm_of_gradients(gradients)
    )


def assert_dense_weights_stay_equal(plant: Plant | None) -> None:
    case = TrainingCase(steps=6, clip_norm=0.1)
    first, second = (host.weights for host in train_on_hosts(case, plant))
    expected = train_single_process(case, plant).weights
    dense = sorted(first.keys() & second.keys())
    assert "stem.weight" in dense
    assert "blocks.0.ffn.gate.weight_ED" in dense
    for name in dense:
        assert torch.equal(first[name], second[name]), f"{name} drifted apart"
        torch.testing.assert_close(first[name], expected[name], rtol=1e-9, atol=1e-9)


def test_all_hosts_clip_by_one_norm() -> None:
    fails_when_planted(assert_dense_weights_stay_equal, clip_by_own_norm, "drifted apart")


# --- the norm omits experts, or counts replicas once per rank


def omit_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExpertParallelStrategy, "gradient_norm", lambda self, *_: dense_norm(self))


def count_replicas_per_host(patch: pytest.MonkeyPatch) -> None:
    def counted(self: ExpertParallelStrategy, _: list[Tensor], expert_squares: Tensor) -> Tensor:
        return (dense_norm(self).square() * self.world.size + expert_squares.sum()).sqrt()

    patch.setattr(ExpertParallelStrategy, "gradient_norm", counted)


def dense_norm(strategy: ExpertParallelStrategy) -> Tensor:
    return norm_of_gradients([p.grad for p in strategy._dense if p.grad is not None])


def assert_clipped_to_the_bound(plant: Plant | None) -> None:
    """The gradients that the optimizer got have the clip norm, each parameter counted once."""
    case = TrainingCase(clip_norm=0.05)
    hosts = train_on_hosts(case, plant)
    assert min(host.norms[0] for host in hosts) > case.clip_norm
    clipped = total_norm(merge_hosts([host.gradients for host in hosts]))
    assert clipped == pytest.approx(case.clip_norm, rel=1e-12), "clipped too little or too much"
    assert hosts[0].norms == pytest.approx(train_single_process(case, plant).norms, rel=1e-12)


@pytest.mark.parametrize("plant", [omit_experts, count_replicas_per_host])
def test_the_norm_counts_each_parameter_once(plant: Plant) -> None:
    fails_when_planted(assert_clipped_to_the_bound, plant, "clipped too little or too much")


# --- expert gradients are exactly doubled: invisible under Adam, so they are compared with slopes of the loss


@dataclass(frozen=True)
class Nudged(Tiny):
    """The weights whose names contain ``part`` are moved a little in one direction."""

    part: str = ""
    distance: float = 0.0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, direction in directions(model, self.part).items():
            model.get_parameter(name).data.add_(self.distance * direction)
        return model


def directions(model: nn.Module, part: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()
    }
    return {name: direction for name, direction in drawn.items() if part in name}


def assert_gradients_are_slopes(part: str, plant: Plant | None) -> None:
    """The gradient along a direction is the slope of the loss, on hosts and in one process."""
    distance = 1e-5
    cases = [TrainingCase(Nudged((SIZES,), part=part, distance=d)) for d in (0.0, distance, -distance)]
    model = cases[0].task.build_model()
    direction = by_expert(model, directions(model, part))
    single = [train_single_process(case, plant) for case in cases]
    hosts = run_ranks(train_on_host, HOSTS, cases, plant)
    host_gradients = merge_hosts([results[0].gradients for results in hosts])
    for results, gradients in ((single, single[0].gradients), (hosts[0], host_gradients)):
        along = sum(float((gradients[name] * direction[name]).sum()) for name in direction)
        slope = (results[1].losses[0] - results[2].losses[0]) / (2 * distance)
        assert abs(slope) > 1e-3
        assert along == pytest.approx(slope, rel=1e-6), (
            f"the gradient of the {part} is not the slope of the loss"
        )


def double_expert_gradients(patch: pytest.MonkeyPatch) -> None:
    real = ExpertParallelStrategy.all_reduce_gradients

    def doubled(self: ExpertParallelStrategy) -> float:
        factor = real(self)
        for stack in (stack for bank in self._banks for _, _, stack in bank.stacks()):
            assert stack.grad is not None
            stack.grad.mul_(2)
        return factor

    patch.setattr(ExpertParallelStrategy, "all_reduce_gradients", doubled)


def test_gradients_of_experts_are_slopes_of_the_loss() -> None:
    fails_when_planted(
        lambda plant: assert_gradients_are_slopes("bank", plant),
        double_expert_gradients,
        "gradient of the bank is not the slope",
    )


def test_doubled_expert_gradients_are_invisible_in_the_losses() -> None:
    """So the check of slopes is needed: losses alone would not show the error."""
    case = TrainingCase(steps=6)
    doubled = train_on_hosts(case, double_expert_gradients)[0].losses
    assert doubled == pytest.approx(train_single_process(case).losses, rel=1e-4)


# --- gradients are doubled at every micro-batch


def double_at_every_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Strategy.loss

    def doubled(self: Strategy, batch: Any, last: bool) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return real(self, batch, last)

    patch.setattr(Strategy, "loss", doubled)


def assert_accumulated_gradients_equal_one_pass(plant: Plant | None) -> None:
    case = TrainingCase(micro_batch=2)  # four micro-batches
    gradients = merge_hosts([host.gradients for host in train_on_hosts(case, plant)])
    assert_gradients_equal(gradients, train_single_process(case, plant).gradients, 1e-10, 1e-12)


def test_accumulated_gradients_equal_those_of_one_pass() -> None:
    fails_when_planted(
        assert_accumulated_gradients_equal_one_pass, double_at_every_micro_batch, "off by .* allowed"
    )


# --- the gate is cut off by a non-differentiable gather


def detach_gate_weights(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def detached(self: Gate, *arguments: Any) -> Any:
        routing = real(self, *arguments)
        return replace(routing, weights_TK=routing.weights_TK.detach())

    patch.setattr(Gate, "forward", detached)


def test_gradients_of_the_gate_are_slopes_of_the_loss() -> None:
    fails_when_planted(
        lambda plant: assert_gradients_are_slopes("gate", plant),
        detach_gate_weights,
        "gradient of the gate is not the slope",
    )
