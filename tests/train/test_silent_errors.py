"""Errors of other MoE trainers that their losses do not show, each by a property that it breaks.

``tests/mutation/planted.yaml`` plants them, and errors that comparisons of hosts with one process find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from harness.hosts.ranks import PEER_GONE, run_ranks
from harness.runs.host_runs import (
    HOSTS,
    SIZES,
    TOP_1_TASK,
    TrainingCase,
    by_expert,
    host_world,
    merge_hosts,
    step_batches,
    train_on_host,
    train_on_hosts,
    train_single_process,
)
from harness.runs.steppers import assert_gradients_equal, mean_loss
from harness.runs.tiny_model import Tiny
from orchestrator.errors import OutOfMemory, TaskFailed, UserError

# --- gradients that are doubled or cut off: invisible under Adam, so they are compared with slopes


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


@pytest.mark.parametrize("part", ["bank", "gate"])
def test_gradients_of_experts_and_of_the_gate_are_slopes_of_the_loss(part: str) -> None:
    """The gradient along a direction is the slope of the loss, on hosts and in one process."""
    distance = 1e-5
    cases = [TrainingCase(Nudged((SIZES,), part=part, distance=d)) for d in (0.0, distance, -distance)]
    model = cases[0].task.build_model()
    direction = by_expert(model, directions(model, part))
    single = [train_single_process(case) for case in cases]
    hosts = run_ranks(train_on_host, HOSTS, cases)
    host_gradients = merge_hosts([results[0].gradients for results in hosts])
    for results, gradients in ((single, single[0].gradients), (hosts[0], host_gradients)):
        along = sum(float((gradients[name] * direction[name]).sum()) for name in direction)
        slope = (results[1].losses[0] - results[2].losses[0]) / (2 * distance)
        assert abs(slope) > 1e-3
        assert along == pytest.approx(slope, rel=1e-6)


# --- 0 × NaN from zero routing weights


@dataclass(frozen=True)
class Poisoned(Tiny):
    """One expert of the first layer has NaN weights."""

    expert: int = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for size_class, _, stack in moe_layers(model)[0][1].bank.stacks():
            if self.expert in size_class.rows:
                stack.data[size_class.rows.index(self.expert)] = torch.nan
        return model


def test_an_expert_that_no_token_chose_changes_nothing() -> None:
    case = TrainingCase(TOP_1_TASK, micro_batch=1, global_batch=2)
    healthy = train_single_process(case)
    unchosen = healthy.loads[0][0].index(0)
    poisoned = replace(case, task=Poisoned((SIZES,), top_k=1, expert=unchosen))
    hosts = train_on_hosts(poisoned)
    for result in (train_single_process(poisoned), *hosts):
        assert result.losses == pytest.approx(healthy.losses, rel=1e-12)
        assert result.norms == pytest.approx(healthy.norms, rel=1e-12)
    gradients = merge_hosts([host.gradients for host in hosts])
    assert_gradients_equal(gradients, healthy.gradients, 1e-10, 1e-12)


# --- a balancer that dies in silence; ours is a part of the step, on every host


def test_the_balancer_works_in_every_step() -> None:
    rate = 0.01
    case = TrainingCase(Tiny((SIZES, SIZES), options={"bias_rate": rate}), steps=4)
    for result in (train_single_process(case), *train_on_hosts(case)):
        expected = [torch.zeros(len(SIZES), dtype=torch.float64) for _ in case.task.sizes]
        for loads, biases in zip(result.loads, result.biases, strict=True):
            for layer, load in enumerate(loads):
                mean = sum(load) / len(load)
                expected[layer] += rate * torch.sign(mean - torch.tensor(load, dtype=torch.float64))
                assert torch.equal(biases[layer], expected[layer])
        assert float(torch.stack(result.biases[-1]).abs().max()) > rate


@dataclass(frozen=True)
class WithoutLoads(Tiny):
    """Has MoE layers, but its loss does not return their loads."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), loads=())


def test_a_task_that_returns_no_loads_is_refused() -> None:
    with pytest.raises(UserError, match="loads"):
        train_single_process(TrainingCase(WithoutLoads((SIZES,))))


# --- one host runs out of memory, and the others keep their batch

OOM_CASE = TrainingCase(Tiny((SIZES,), samples=48), micro_batch=4, steps=3)
OOM_CALL = 3  # of the forward passes, two in a step


@dataclass
class OomResult:
    """The steps that a host completed, and the error that ended its run."""

    losses: list[float] = field(default_factory=list)
    error: Exception | None = None


def fail_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make one call of a forward pass run out of memory."""
    calls = count(1)

    def call(batch: Any, samples: int, last: bool) -> Any:
        if next(calls) == OOM_CALL:
            raise torch.OutOfMemoryError("injected")
        return forward(batch, samples, last)

    return call


def train_out_of_memory(rank: int, size: int, store: str) -> OomResult:
    """Train; the second host runs out of memory in the second step."""
    result = OomResult()
    try:
        with host_world(rank, size, store) as world:
            stepper, feed = OOM_CASE.stepper(world)
            if rank == 1:
                stepper._forward = fail_once(stepper._forward)
            for step, batch in enumerate(step_batches(feed, OOM_CASE.steps)):
                result.losses.append(mean_loss(stepper.run(batch, step)))
    except Exception as error:
        result.error = error
    return result


def test_hosts_end_together_when_one_runs_out_of_memory() -> None:
    """Tokens have been sent already, so no vote is possible: the run restarts with a smaller micro-batch.

    The other host's error is not the user's, which would never be retried."""
    first, second = run_ranks(train_out_of_memory, HOSTS)
    expected = train_single_process(OOM_CASE).losses[:1]
    assert first.losses == second.losses == pytest.approx(expected, rel=1e-12)
    assert any(phrase in str(first.error) for phrase in PEER_GONE)
    assert not isinstance(first.error, TaskFailed)
    assert isinstance(second.error, OutOfMemory)
    assert str(second.error) == "worker 1 ran out of memory at step 2 with a micro-batch of 4"
