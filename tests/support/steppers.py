"""Living parts for tests, without a run folder: a stepper over a built-in task, in fp32 or fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from experts.model import place
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.data import Feed, LoaderOptions
from orchestrator.train.parts.clock import PhaseClock
from orchestrator.train.parts.memory import recompute_blocks
from orchestrator.train.parts.optim import ScheduledOptimizer, build_adamw, warmup_schedule
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World
from orchestrator.train.step import Stepper
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.ddp import DDPOptions, DDPStrategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy
from orchestrator.train.strategies.fsdp import FSDPStrategy, full_tensor, shard_model
from orchestrator.train.totals import Totals


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
    """Collects what a stepper or loop tells."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.heard.append((event, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.heard if event == kind]


def make_stepper(
    task: Any,
    micro_batch: int,
    global_batch: int,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    tell: Callable[..., None] | None = None,
    world: World | None = None,
    sharding: str = "none",
    options: DDPOptions | None = None,
    offload: bool = False,
    host_of: Sequence[Sequence[int]] | None = None,
    chunks: int = 1,
    bucket_mb: int | None = None,
    recompute: bool = False,
) -> tuple[Stepper, Feed]:
    """``micro_batch`` is per worker. ``host_of`` places the experts of each layer on the workers."""
    config = Config.of(learning_rate=learning_rate)
    world, tell = world or World.single_process(), tell or Events()
    model = task.build_model()
    model.train()
    if sharding == "none":
        model.to(world.device)
    replica = Strategy(model, task)
    if sharding != "none":
        shard_model(model, world, keep_parameters=sharding == "zero2", offload=offload)
        replica = FSDPStrategy(model, task, world)
    elif world.size > 1 and host_of is not None:
        place(model, host_of, world.rank)
        replica = ExpertParallelStrategy(model, task, world, chunks, bucket_mb)
    elif world.size > 1:
        replica = DDPStrategy(
            model, task, world, options or DDPOptions(), lambda message: tell("warning", message=message)
        )
    if recompute:
        recompute_blocks(model, replica.context)
    learner = ScheduledOptimizer(
        build_adamw(model.parameters(), config.optim, fused=True), warmup_schedule("constant", 0, 1000)
    )
    feed = Feed(
        task.train_data(),
        world,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        feeding=LoaderOptions(),
    )
    precision = Precision("fp32", world.device)
    return Stepper(
        world, replica, learner, precision, feed.largest_micro_batch, 0, clip_norm, PhaseClock(), tell
    ), feed


def run_steps(stepper: Stepper, feed: Feed, steps: int) -> list[Totals]:
    done: list[Totals] = []
    epoch = 0
    while len(done) < steps:
        for portion in feed.steps(epoch):
            if len(done) < steps:
                done.append(stepper.run(portion, len(done)))
        epoch += 1
    return done


def mean_loss(totals: Totals) -> float:
    return float(totals.loss) / float(totals.count)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole ones, also of a sharded model: every worker must ask."""
    return {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def assert_gradients_equal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], of_own: float, of_global: float
) -> None:
    """Each gradient within a share of its own norm plus a share of the global one."""
    assert ours.keys() == theirs.keys()
    whole = float(torch.stack([g.double().norm() for g in theirs.values()]).norm())
    for name, mine in ours.items():
        off, allowed = (
            float((mine.double() - theirs[name].double()).norm()),
            of_own * float(theirs[name].double().norm()) + of_global * whole,
        )
        assert off <= allowed, f"{name}: off by {off:.3g}, {allowed:.3g} allowed"
