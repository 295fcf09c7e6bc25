"""Steppers for tests without a run folder: a task, a strategy, an optimizer and a feed, in fp32 or fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from experts.structure import LayerStructure
from harness.fakes.inventories import machine, model
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ShardingForm
from orchestrator.plan.planning import plan
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.fsdp import full_tensor
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.types import Choice, PrecisionName

T = TypeVar("T")

CONSTANT_RATE: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "max_steps": 1000}

UNEVEN_EXPERTS = Config.of(
    expert_hidden_size=(8, 16, 8, 24, 16),
    experts=5,
    width=16,
    balance_loss=0.05,
    z_loss=0.001,
    sequence_length=24,
    layers=2,
)
"""Experts of several sizes whose number no number of workers divides, with both losses of the gate."""


class DoubleDigits(Digits):
    """Digits in fp64, where the mathematics is proven."""

    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def train_data(self) -> TensorData:
        images, labels = super().train_data().tensors
        return TensorData(images.double(), labels)


class DoubleText(Text):
    def build_model(self) -> nn.Module:
        return super().build_model().double()


class Events:
    """Collects the events of a stepper or loop."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]


def make_stepper(
    task: Any,
    micro_batch: int,
    global_batch: int,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    emit: Callable[..., None] | None = None,
    world: World | None = None,
    sharding: ShardingForm = "none",
    host_of: Sequence[Sequence[int]] | None = None,
    chunks: int = 1,
    recompute: bool = False,
    precision: PrecisionName = "fp32",
    experts: Sequence[LayerStructure] | None = None,
    **settings: Any,
) -> tuple[Stepper, Feed]:
    """Build a stepper and its feed as a run does, with the choices of a plan as they are given.

    ``micro_batch`` is per worker. ``host_of`` places the experts of each layer on the workers. ``experts``
    are those of a saved run, with their hosts: their weights are still to be restored."""
    world = world or World.single_process()
    emit = emit or Events()
    config = Config.of(
        task="synthetic", learning_rate=learning_rate, clip_norm=clip_norm, **CONSTANT_RATE, **settings
    )
    chosen = replace(
        plan(config, machine(), model()),
        batch_size=_given(micro_batch),
        global_batch_size=_given(global_batch),
        sharding=_given(sharding),
        exchange_chunks=_given(chunks),
        activation_checkpointing=_given(recompute),
        precision=_given(precision),
        fused_optimizer=_given(True),
    )
    if world.size == 1:
        host_of = None
    elif host_of is None and experts is not None:
        host_of = [[expert.hosts[0] for expert in layer.experts] for layer in experts]
    parts = build_parts(config, chosen, task, world, emit, host_of, experts)
    feed = build_feed(config, chosen, task, world)
    size = feed.micro_batch if parts.strategy.lockstep else feed.largest_micro_batch
    return build_stepper(config, world, parts, size, emit), feed


def _given(value: T) -> Choice[T]:
    return Choice(value, "given")


def run_steps(stepper: Stepper, feed: Feed, steps: int) -> list[Totals]:
    """Run the first steps of training, over as many epochs as they take."""
    totals: list[Totals] = []
    epoch = 0
    while len(totals) < steps:
        for batch in feed.steps(epoch):
            if len(totals) < steps:
                totals.append(stepper.run(batch, len(totals)))
        epoch += 1
    return totals


def mean_loss(totals: Totals) -> float:
    return float(totals.loss) / float(totals.count)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return full gradients, also of a sharded model: every worker must call."""
    return {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def assert_gradients_equal(
    actual: dict[str, Tensor], expected: dict[str, Tensor], of_own: float, of_global: float
) -> None:
    """Each gradient is within a share of its own norm plus a share of the global one."""
    assert actual.keys() == expected.keys()
    global_norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
    for name, gradient in actual.items():
        off = float((gradient.double() - expected[name].double()).norm())
        allowed = of_own * float(expected[name].double().norm()) + of_global * global_norm
        assert off <= allowed, f"{name}: off by {off:.3g}, {allowed:.3g} allowed"
