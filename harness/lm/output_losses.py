"""Steps of the task lm with the loss at the output layer in chunks, and with whole logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from experts.transformers.lora.adapters import add_lora
from harness.lm.families import VOCABULARY, Fp32MeansFp64
from harness.lm.family_lm import WEIGHT, FamilyLanguageModel
from harness.lm.family_runs import AUX_FAMILIES, CPU, GLOBAL_BATCH, placement
from harness.lm.lora_runs import OPTIONS, fill_adapters
from harness.runs.host_runs import step_batches
from harness.runs.steppers import gradients, make_stepper, mean_loss
from orchestrator.plan.estimate import ShardingForm
from orchestrator.tasks import token_loss
from orchestrator.tasks.lm import output_layer
from orchestrator.tasks.lm.balance import StepBalance
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A family, and the parts of a training that have to do with its output layer."""

    name: str
    sharding: ShardingForm = "none"
    recompute: bool = False
    lora: bool = False
    data_parallel: bool = False


@dataclass(frozen=True)
class Steps:
    """Losses of some steps, and the gradients of the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    num_chunked: int
    """Passes whose loss was computed in chunks."""


class CaseTask(FamilyLanguageModel):
    """A family in fp64, with its auxiliary loss where it has one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.name)
        self._balance = StepBalance(WEIGHT) if case.name in AUX_FAMILIES else None
        self._has_adapters = case.lora

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self._has_adapters:
            add_lora(model, OPTIONS)
            fill_adapters(model)
        for block in chain.from_iterable(block_lists(model)):
            # A backward pass that recomputes it is outside of the context of the loss.
            block.forward = partial(_in_fp64, block.forward)
        return model


def _in_fp64(forward: Any, *arguments: Any, **keywords: Any) -> Any:
    with Fp32MeansFp64():
        return forward(*arguments, **keywords)


@contextmanager
def chunks(vocabulary: int = VOCABULARY) -> Iterator[mock.Mock]:
    """Compute the loss of any size in chunks of three tokens; yield a record of its calls."""
    columns = vocabulary if vocabulary % 8 == 0 else vocabulary + -vocabulary % 64
    with (
        mock.patch.object(token_loss, "LARGE_LOGITS", 1),
        mock.patch.object(token_loss, "CHUNK_LOGITS", 3 * columns),
        mock.patch.object(output_layer, "token_loss", wraps=output_layer.token_loss) as calls,
    ):
        yield calls


def train(case: Case, world: World) -> Steps:
    """Train with micro-batches of two samples, the last of one."""
    stepper, feed = make_stepper(
        CaseTask(case),
        2,
        GLOBAL_BATCH,
        1e-3,
        clip_norm=1e9,
        world=world,
        host_of=None if case.data_parallel else placement(case.name, world.size),
        sharding=case.sharding,
        recompute=case.recompute,
    )
    batches = step_batches(feed, STEPS)
    losses = [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(batches)]
    return Steps(losses, gradients(stepper.strategy.model), 0)


def train_both(case: Case, world: World) -> tuple[Steps, Steps]:
    """Return steps in chunks, and with whole logits."""
    with chunks() as calls:
        found = train(case, world)
    return Steps(found.losses, found.gradients, calls.call_count), train(case, world)


def train_both_on_host(rank: int, size: int, store: str, cases: Sequence[Case]) -> list[tuple[Steps, Steps]]:
    torch.set_num_threads(1)
    found: list[tuple[Steps, Steps]] = []
    for number, case in enumerate(cases):
        path = f"{store}-{number}"
        with process_group_world(file_store(path, size), rank, size, CPU, "gloo", 60) as world:
            found.append(train_both(case, world))
    return found


def assert_equal(found: Steps, expected: Steps) -> None:
    """In fp64: losses to 1e-12, each gradient within 1e-10 of its norm."""
    assert found.num_chunked > 0
    for loss, other in zip(found.losses, expected.losses, strict=True):
        assert abs(loss - other) <= 1e-12 * abs(other)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        other = expected.gradients[name]
        off = float((gradient - other).norm())
        assert off <= 1e-10 * float(other.norm()) + 1e-14, f"{name}: off by {off:.3g} of {other.norm():.3g}"
