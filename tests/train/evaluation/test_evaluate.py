"""Tests of an evaluation whose workers differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.hosts.ranks import run_ranks
from orchestrator.config.settings import Config
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.precision import Precision
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.ddp import DDPStrategy

CPU = torch.device("cpu")


class Normed(Task):
    """A batch norm before a linear layer."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    def train_data(self) -> TensorData:
        x = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return TensorData(x, torch.arange(9) % 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, labels = batch
        return Loss(F.cross_entropy(model(x), labels, reduction="sum"), len(labels))


def loss_with_running_mean(world: World, mean: float) -> float:
    task = Normed()
    model = task.build_model()
    strategy = Strategy(model, task)
    if world.size > 1:
        strategy = DDPStrategy(model, task, world, Config().parallel, lambda _: None)
    # Afterwards: DDP begins with the buffers of the main worker.
    model.get_buffer("0.running_mean").fill_(mean)
    data = task.train_data()
    feed = open_feed(data, world, global_batch=4, micro_batch=2, seed=None, loader=LoaderOptions())
    return Evaluation(strategy, feed, Precision("fp32", CPU))()["loss"]


def loss_on_rank(rank: int, size: int, store: str) -> float:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        return loss_with_running_mean(world, mean=1.0 + rank)


def test_the_running_statistics_of_the_main_worker_are_evaluated() -> None:
    """Those of the workers differ after a training step, as each has seen other samples."""
    expected = loss_with_running_mean(World.single_process(), mean=1.0)
    assert loss_with_running_mean(World.single_process(), mean=2.0) != pytest.approx(expected, rel=1e-3)
    assert run_ranks(loss_on_rank, 2) == pytest.approx([expected] * 2, rel=1e-12)
