"""Silent errors of other MoE trainers, one test each, as in the table in ``facts.md``: gradients and their norm. A check passes, and
fails where the error is planted in our own code, on the hosts and in the one process they are held against alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.gate import Gate
from orchestrator.train.parts.optim import norm_of_gradients
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy
from tests.support.planted_faults import (
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
from tests.support.ranks import run_ranks
from tests.support.steppers import assert_gradients_equal
from tests.support.tiny_model import Tiny

# Gradient norm averaged over ranks that own different experts.


def averages_norms(patch: pytest.MonkeyPatch) -> None:
    def averaged(self: ExpertParallelStrategy, gradients: list[Tensor], squares: Tensor | None) -> Tensor:
        return self.world.all_reduce(norm_of_gradients(gradients)) / self.world.size

    patch.setattr(ExpertParallelStrategy, "gradient_norm", averaged)


def norms_equal_one_process(plant: Plant | None) -> None:
    case = TrainingCase(steps=3, clip_norm=0.5)
    expected = train_single_process(case, plant).norms
    for host in train_on_hosts(case, plant):
        assert host.norms == pytest.approx(expected, rel=1e-12), "the gradient norm is another one on hosts"


def test_gradient_norm_averaged_over_ranks_that_own_different_experts() -> None:
    fails_when_planted(norms_equal_one_process, averages_norms, "gradient norm is another one")


# Each expert group clips by its own norm.


def clips_by_own_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ExpertParallelStrategy, "gradient_norm", lambda self, gradients, squares: norm_of_gradients(gradients)
    )


def dense_weights_stay_together(plant: Plant | None) -> None:
    case = TrainingCase(steps=6, clip_norm=0.1)
    first, second = (host.weights for host in train_on_hosts(case, plant))
    expected = train_single_process(case, plant).weights
    shared = sorted(first.keys() & second.keys())
    assert "stem.weight" in shared
    assert "blocks.0.ffn.gate.weight_ED" in shared
    for name in shared:
        assert torch.equal(first[name], second[name]), f"{name} drifted apart"
        torch.testing.assert_close(first[name], expected[name], rtol=1e-9, atol=1e-9)


def test_each_expert_group_clips_by_its_own_norm() -> None:
    fails_when_planted(dense_weights_stay_together, clips_by_own_norm, "drifted apart")


# The norm leaves experts out, or counts replicas once per rank.


def leaves_experts_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExpertParallelStrategy, "gradient_norm", lambda self, gradients, squares: _dense_norm(self))


def counts_replicas_per_host(patch: pytest.MonkeyPatch) -> None:
    def counted(self: ExpertParallelStrategy, gradients: list[Tensor], squares: Tensor) -> Tensor:
        return (_dense_norm(self).square() * self.world.size + squares.sum()).sqrt()

    patch.setattr(ExpertParallelStrategy, "gradient_norm", counted)


def _dense_norm(replica: ExpertParallelStrategy) -> Tensor:
    return norm_of_gradients([p.grad for p in replica._dense if p.grad is not None])


def clipped_to_the_bound(plant: Plant | None) -> None:
    """What the optimizer got, added up here over each parameter once."""
    case = TrainingCase(clip_norm=0.05)
    hosts = train_on_hosts(case, plant)
    assert min(host.norms[0] for host in hosts) > case.clip_norm
    clipped = total_norm(merge_hosts([host.gradients for host in hosts]))
    assert clipped == pytest.approx(case.clip_norm, rel=1e-12), "clipped too little or too much"
    assert hosts[0].norms == pytest.approx(train_single_process(case, plant).norms, rel=1e-12)


@pytest.mark.parametrize("plant", [leaves_experts_out, counts_replicas_per_host])
def test_norm_leaves_experts_out_or_counts_replicas_once_per_rank(plant: Plant) -> None:
    fails_when_planted(clipped_to_the_bound, plant, "clipped too little or too much")


# Expert gradients exactly doubled: invisible under Adam, so gradients are held against differences of the loss.


@dataclass(frozen=True)
class Nudged(Tiny):
    """``part`` of the weights moved a little in one direction."""

    part: str = ""
    by: float = 0.0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, direction in directions(model, self.part).items():
            model.get_parameter(name).data.add_(self.by * direction)
        return model


def directions(model: nn.Module, part: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()
    }
    return {name: direction for name, direction in drawn.items() if part in name}


def gradients_are_slopes(part: str, plant: Plant | None) -> None:
    """The gradient along a direction is what the loss does there, on hosts as in one process."""
    small = 1e-5
    cases = [TrainingCase(Nudged((SIZES,), part=part, by=by)) for by in (0.0, small, -small)]
    model = cases[0].task.build_model()
    direction = by_expert(model, directions(model, part))
    one, hosts = (
        [train_single_process(case, plant) for case in cases],
        run_ranks(train_on_host, HOSTS, cases, plant),
    )
    for runs, gradients in (
        (one, one[0].gradients),
        (hosts[0], merge_hosts([host[0].gradients for host in hosts])),
    ):
        along = sum(float((gradients[name] * direction[name]).sum()) for name in direction)
        slope = (runs[1].losses[0] - runs[2].losses[0]) / (2 * small)
        assert abs(slope) > 1e-3
        assert along == pytest.approx(slope, rel=1e-6), (
            f"the gradient of the {part} is not the slope of the loss"
        )


def doubles_expert_gradients(patch: pytest.MonkeyPatch) -> None:
    real = ExpertParallelStrategy.all_reduce_gradients

    def doubled(self: ExpertParallelStrategy) -> float:
        factor = real(self)
        for stack in (stack for bank in self._banks for _, _, stack in bank.stacks()):
            assert stack.grad is not None
            stack.grad.mul_(2)
        return factor

    patch.setattr(ExpertParallelStrategy, "all_reduce_gradients", doubled)


def test_expert_gradients_exactly_doubled() -> None:
    fails_when_planted(
        lambda plant: gradients_are_slopes("bank", plant),
        doubles_expert_gradients,
        "gradient of the bank is not the slope",
    )
    case = TrainingCase(steps=6)
    hidden, right = (
        train_on_hosts(case, doubles_expert_gradients)[0].losses,
        train_single_process(case).losses,
    )
    assert hidden == pytest.approx(right, rel=1e-4), "the losses would have told"


# Gradients doubled at every micro-batch.


def doubles_at_every_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Strategy.loss

    def doubled(self: Strategy, batch: Any, last: bool) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return real(self, batch, last)

    patch.setattr(Strategy, "loss", doubled)


def accumulated_gradients_equal_one_pass(plant: Plant | None) -> None:
    case = TrainingCase(micro_batch=2)  # four micro-batches
    found = merge_hosts([host.gradients for host in train_on_hosts(case, plant)])
    assert_gradients_equal(found, train_single_process(case, plant).gradients, 1e-10, 1e-12)


def test_gradients_doubled_at_every_micro_batch() -> None:
    fails_when_planted(
        accumulated_gradients_equal_one_pass, doubles_at_every_micro_batch, "off by .* allowed"
    )


# Router cut off by a non-differentiable gather.


def cuts_the_router_off(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def cut(self: Gate, *arguments: Any) -> Any:
        routing = real(self, *arguments)
        return replace(routing, weights_TK=routing.weights_TK.detach())

    patch.setattr(Gate, "forward", cut)


def test_router_cut_off_by_a_non_differentiable_gather() -> None:
    fails_when_planted(
        lambda plant: gradients_are_slopes("gate", plant),
        cuts_the_router_off,
        "gradient of the gate is not the slope",
    )
