"""Faults planted in the code under test: small runs on two hosts and in one process, and checks that must
fail when a fault is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from experts.balance import gated_layers
from experts.expert_state import split_experts, stacked_names
from harness.hosts.ranks import RanksFailed, run_ranks
from harness.runs.steppers import make_stepper, mean_loss
from harness.runs.tiny_model import Tiny
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper

HOSTS = 2
LEARNING_RATE = 1e-2
SIZES = (3, 5, 2, 4, 6, 7)  # all different, so that each expert is a parameter by itself
TOP_2_TASK = Tiny((SIZES,))
TOP_1_TASK = Tiny((SIZES,), top_k=1)
Plant = Callable[[pytest.MonkeyPatch], None]
"""Plants a fault by patching the code under test."""


@dataclass(frozen=True)
class TrainingCase:
    """A run on two hosts, with every other expert on the second; ``micro_batch`` is per host."""

    task: Tiny = TOP_2_TASK
    micro_batch: int = 8
    global_batch: int = 16
    clip_norm: float = 0.0
    steps: int = 1
    recompute: bool = False

    def stepper(self, world: World) -> tuple[Stepper, Feed]:
        """Build the run's stepper.

        One process computes the global batch at once, and recomputes nothing.
        """
        single = world.size == 1
        host_of = [[expert % HOSTS for expert in range(len(sizes))] for sizes in self.task.sizes]
        return make_stepper(
            self.task,
            self.global_batch if single else self.micro_batch,
            self.global_batch,
            learning_rate=LEARNING_RATE,
            clip_norm=self.clip_norm,
            world=world,
            host_of=None if single else host_of,
            recompute=self.recompute and not single,
        )


@dataclass(frozen=True)
class TrainingResult:
    losses: list[float]
    norms: list[float]
    loads: list[list[list[int]]]
    """By step and layer."""
    biases: list[list[Tensor]]
    gradients: dict[str, Tensor]
    """Of the first step, as the optimizer got them, by expert."""
    weights: dict[str, Tensor]


def train(case: TrainingCase, world: World) -> TrainingResult:
    stepper, feed = case.stepper(world)
    model = stepper.strategy.model
    totals: list[Totals] = []
    biases: list[list[Tensor]] = []
    first_gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(step_batches(feed, case.steps)):
        totals.append(stepper.run(batch, step))
        biases.append([layer.gate.bias_E.clone() for _, layer in gated_layers(model)])
        if step == 0:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            first_gradients = by_expert(model, gradients)
    return TrainingResult(
        losses=[mean_loss(t) for t in totals],
        norms=[_norm(t) for t in totals],
        loads=[[load.tolist() for load in t.loads] for t in totals],
        biases=biases,
        gradients=first_gradients,
        weights=by_expert(model, dict(model.named_parameters())),
    )


def step_batches(feed: Feed, steps: int) -> Iterator[StepBatch]:
    """Return the batches of the first steps, over as many epochs as they take."""
    endless = (batch for epoch in count() for batch in feed.steps(epoch))
    return (next(endless) for _ in range(steps))


def by_expert(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors by parameter, with stacks of experts split into one tensor per expert."""
    split = split_experts(tensors, stacked_names(model))
    return {name: tensor.detach().clone() for name, tensor in split.items()}


def _norm(totals: Totals) -> float:
    assert totals.norm is not None
    return float(totals.norm)


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


@contextmanager
def planted_world(rank: int, size: int, store: str, plant: Plant | None) -> Iterator[World]:
    """The world of one rank, with a fault planted in its process."""
    with (
        planted(plant),
        process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 20) as world,
    ):
        yield world


def train_on_host(
    rank: int, size: int, store: str, cases: Sequence[TrainingCase], plant: Plant | None
) -> list[TrainingResult]:
    with planted_world(rank, size, store, plant) as world:
        return [train(case, world) for case in cases]


def train_on_hosts(case: TrainingCase, plant: Plant | None) -> list[TrainingResult]:
    """Return the results of all hosts, by rank."""
    return [results[0] for results in run_ranks(train_on_host, HOSTS, [case], plant)]


def train_single_process(case: TrainingCase, plant: Plant | None = None) -> TrainingResult:
    with planted(plant):
        return train(case, World.single_process())


def merge_hosts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return each tensor once: experts from their hosts, the dense part from any."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def fails_when_planted(check: Callable[[Plant | None], None], plant: Plant, match: str) -> None:
    """Assert that a check passes, and that its comparison fails when the fault is planted.

    A rank that fails for another reason than the comparison does not count.
    """
    check(None)
    with pytest.raises(AssertionError, match=match) as caught:
        check(plant)
    assert not isinstance(caught.value, RanksFailed)
