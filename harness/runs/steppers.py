"""Steppers for tests without a run folder: a task, a strategy, an optimizer and a feed, in fp32 or fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experts.structure import LayerStructure
from harness.fakes.inventories import machine, model
from orchestrator.config.settings import Config
from orchestrator.plan.planning import plan
from orchestrator.record.events.decoding import to_json
from orchestrator.record.events.kinds import Event, JsonEvent
from orchestrator.record.files.log import Emit
from orchestrator.record.files.reading import of_kind
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from orchestrator.train.optim.shards import full_tensor
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.placed_experts import PlacedExperts
from orchestrator.types import Choice, PrecisionName

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


STEPPER_CONFIG = Config.of(
    task="synthetic",
    schedule="constant",
    evolution="off",
    rebalance="off",
    seed=0,
    broadcast_buffers="off",
)
"""The settings of steppers."""


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
        self.events: list[JsonEvent] = []

    def __call__(self, event: Event) -> None:
        self.events.append(to_json(event))

    def of(self, kind: str) -> list[JsonEvent]:
        return of_kind(self.events, kind)


def make_stepper(
    task: Any,
    micro_batch: int,
    global_batch: int,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    emit: Emit | None = None,
    world: World | None = None,
    sharding: str = "none",
    offload: bool = False,
    host_of: Sequence[Sequence[int]] | None = None,
    chunks: int = 1,
    recompute: bool = False,
    precision: PrecisionName = "fp32",
    experts: Sequence[LayerStructure] | None = None,
    **settings: Any,
) -> tuple[Stepper, Feed]:
    """Build a stepper as a run does, and its feed.

    ``micro_batch`` is per worker. ``host_of`` places the experts of each layer on the workers. ``experts``
    are those of a saved run, with their hosts: their weights are still to be restored. ``settings`` are
    further settings of the run.
    """
    world = world or World.single_process()
    emit = emit or Events()
    config = STEPPER_CONFIG.but(learning_rate=learning_rate, clip_norm=clip_norm, **settings)
    choices: dict[str, Any] = {
        "sharding": sharding,
        "exchange_chunks": chunks,
        "activation_checkpointing": recompute,
        "precision": precision,
        "expert_kernel": "auto",
        "learning_rate": learning_rate,
        "warmup_steps": 0,
        "fused_optimizer": True,
        "compile": False,
    }
    changes: dict[str, Any] = {name: Choice(value, "a test") for name, value in choices.items()}
    chosen = replace(plan(config, machine(), model()), **changes)
    if world.size == 1:
        host_of = None
    elif experts is not None:
        host_of = [[expert.hosts[0] for expert in layer.experts] for layer in experts]
    if offload:
        # The plan of one process refuses it.
        config = config.but(sharding=sharding, cpu_offload=True)
    parts = build_parts(config, chosen, task, world, emit, PlacedExperts(experts, host_of))
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        loader=LoaderOptions(),
    )
    return build_stepper(config, world, parts, feed.largest_micro_batch, emit), feed


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
