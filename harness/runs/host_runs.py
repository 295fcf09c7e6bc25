"""Small runs on two hosts and in one process, whose steps are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from experts.balance import gated_layers
from experts.expert_state import split_experts, stacked_names
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, mean_loss
from harness.runs.tiny_model import Tiny
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.shards import full_tensor
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper

HOSTS = 2
LEARNING_RATE = 1e-2
SIZES = (3, 5, 2, 4, 6, 7)  # all different, so that each expert is a parameter by itself
TOP_2_TASK = Tiny((SIZES,))
TOP_1_TASK = Tiny((SIZES,), top_k=1)


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
    """Return copies of tensors by parameter, with stacks of experts split into one tensor per expert.

    Shards are gathered: every host must call."""
    whole = {name: full_tensor(tensor.detach()) for name, tensor in tensors.items()}
    split = split_experts(whole, stacked_names(model))
    return {name: tensor.clone() for name, tensor in split.items()}


def _norm(totals: Totals) -> float:
    assert totals.norm is not None
    return float(totals.norm)


@contextmanager
def host_world(rank: int, size: int, store: str) -> Iterator[World]:
    """The world of one rank."""
    device = torch.device("cpu")
    with process_group_world(file_store(store, size), rank, size, device, "gloo", 20) as world:
        yield world


def train_on_host(rank: int, size: int, store: str, cases: Sequence[TrainingCase]) -> list[TrainingResult]:
    with host_world(rank, size, store) as world:
        return [train(case, world) for case in cases]


def train_on_hosts(case: TrainingCase) -> list[TrainingResult]:
    """Return the results of all hosts, by rank."""
    return [results[0] for results in run_ranks(train_on_host, HOSTS, [case])]


def train_single_process(case: TrainingCase) -> TrainingResult:
    return train(case, World.single_process())


def merge_hosts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return each tensor once: experts from their hosts, the dense part from any."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())
