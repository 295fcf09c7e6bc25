"""Steppers for tests without a run folder: a task, a strategy, an optimizer and a feed, in fp32 or fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.model import place, place_structure
from experts.structure import LayerStructure
from experts.surgery.surgery import restructure
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.device.precision import Precision
from orchestrator.train.device.recompute import recompute_blocks
from orchestrator.train.group.world import World
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.ddp import DDPOptions, DDPStrategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy
from orchestrator.train.strategies.fsdp import FSDPStrategy, full_tensor, shard_model
from orchestrator.train.strategies.sharded_dense import ShardedDenseStrategy
from orchestrator.types import PrecisionName

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
    sharding: str = "none",
    options: DDPOptions | None = None,
    offload: bool = False,
    host_of: Sequence[Sequence[int]] | None = None,
    chunks: int = 1,
    bucket_mb: int | None = None,
    recompute: bool = False,
    precision: PrecisionName = "fp32",
    experts: Sequence[LayerStructure] | None = None,
) -> tuple[Stepper, Feed]:
    """Build a stepper and its feed.

    ``micro_batch`` is per worker. ``host_of`` places the experts of each layer on the workers. ``experts``
    are those of a saved run, with their hosts: their weights are still to be restored.
    """
    world = world or World.single_process()
    emit = emit or Events()
    model = task.build_model()
    if experts is not None:
        restructure([layer for _, layer in moe_layers(model)], experts)
        model.to(task.dtype)
    model.train()
    on_hosts = world.size > 1 and (host_of is not None or experts is not None)
    if sharding == "none" or on_hosts:
        model.to(world.device)
    strategy = Strategy(model, task)
    if sharding != "none" and not on_hosts:
        shard_model(model, world, keep_parameters=sharding == "zero2", offload=offload)
        strategy = FSDPStrategy(model, task, world)
    elif on_hosts:
        if experts is not None:
            place_structure(model, experts, world.rank, world.size)
        elif host_of is not None:
            place(model, host_of, world.rank)
        if sharding == "none":
            strategy = ExpertParallelStrategy(model, task, world, chunks, bucket_mb)
        else:
            strategy = ShardedDenseStrategy(model, task, world, chunks, keep_parameters=sharding == "zero2")
    elif world.size > 1:
        strategy = DDPStrategy(
            model, task, world, options or DDPOptions(), lambda message: emit("warning", message=message)
        )
    if recompute:
        recompute_blocks(model, strategy.context)
    settings = Config.of(learning_rate=learning_rate).optim
    adamw = build_named_optimizer(model, settings, fused=True)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        loader=LoaderOptions(),
    )
    stepper = Stepper(
        world=world,
        strategy=strategy,
        optimizer=ScheduledOptimizer(adamw, warmup_schedule("constant", 0, 1000)),
        precision=Precision(precision, world.device),
        micro_batch=feed.largest_micro_batch,
        seed=0,
        clip_norm=clip_norm,
        clock=PhaseClock(),
        emit=emit,
    )
    return stepper, feed


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
