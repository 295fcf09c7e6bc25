"""Errors planted in our own code: a small run on two hosts and in one process, and a check that must fail where one is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.expert_state import split_experts, stacked_names
from orchestrator.train.data import Feed, StepBatch
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.step import Stepper
from orchestrator.train.totals import Totals
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.steppers import make_stepper, mean_loss
from tests.support.tiny_model import Tiny

HOSTS = 2
RATE = 1e-2
SIZES = (3, 5, 2, 4, 6, 7)  # each of its own: an expert is a parameter by itself
TASK, CHOOSY = Tiny((SIZES,)), Tiny((SIZES,), top_k=1)
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Case:
    """A run on two hosts, with every other expert on the second: ``micro`` samples of each at once."""

    task: Tiny = TASK
    micro: int = 8
    whole: int = 16
    clip: float = 0.0
    steps: int = 1
    recompute: bool = False

    def stepper(self, world: World) -> tuple[Stepper, Feed]:
        """One process takes the batch in one piece, and recomputes nothing."""
        alone = world.size == 1
        return make_stepper(
            self.task,
            self.whole if alone else self.micro,
            self.whole,
            learning_rate=RATE,
            clip_norm=self.clip,
            world=world,
            host_of=None
            if alone
            else [[expert % HOSTS for expert in range(len(sizes))] for sizes in self.task.sizes],
            recompute=self.recompute and not alone,
        )


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    norms: list[float]
    loads: list[list[list[int]]]
    """By step and layer."""
    biases: list[list[Tensor]]
    gradients: dict[str, Tensor]
    """Of the first step, as the optimizer got them, by expert."""
    weights: dict[str, Tensor]


def ran(case: Case, world: World) -> Ran:
    stepper, feed = case.stepper(world)
    model, done, biases = stepper.strategy.model, [], []
    first: dict[str, Tensor] = {}
    for step, portion in enumerate(portions(feed, case.steps)):
        done.append(stepper.run(portion, step))
        biases.append([layer.gate.bias_E.clone() for _, layer in moe_layers(model)])
        if not step:
            first = by_expert(
                model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            )
    loads = [[load.tolist() for load in totals.loads] for totals in done]
    weights = by_expert(model, dict(model.named_parameters()))
    return Ran(
        [mean_loss(totals) for totals in done],
        [_norm(totals) for totals in done],
        loads,
        biases,
        first,
        weights,
    )


def portions(feed: Feed, steps: int) -> Iterator[StepBatch]:
    whole = (portion for epoch in count() for portion in feed.steps(epoch))
    return (next(whole) for _ in range(steps))


def by_expert(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in split_experts(tensors, stacked_names(model)).items()
    }


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
def hosted(rank: int, size: int, store: str, plant: Plant | None) -> Iterator[World]:
    with (
        planted(plant),
        process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 20) as world,
    ):
        yield world


def on_host(rank: int, size: int, store: str, cases: Sequence[Case], plant: Plant | None) -> list[Ran]:
    with hosted(rank, size, store, plant) as world:
        return [ran(case, world) for case in cases]


def on_hosts(case: Case, plant: Plant | None) -> list[Ran]:
    return [found for (found,) in run_ranks(on_host, HOSTS, [case], plant)]


def alone(case: Case, plant: Plant | None = None) -> Ran:
    with planted(plant):
        return ran(case, World.single_process())


def merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor once: experts from their hosts, the dense part from any."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def shows(check: Callable[[Plant | None], None], plant: Plant, match: str) -> None:
    """The check passes; with the error planted its comparison fails, and no rank stumbles for another reason."""
    check(None)
    with pytest.raises(AssertionError, match=match) as caught:
        check(plant)
    assert not isinstance(caught.value, RanksFailed)
