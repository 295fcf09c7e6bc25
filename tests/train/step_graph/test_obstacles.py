"""Obstacles to the capture of a step are named before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from experts.moe.layer import MoELayer
from experts.moe.statistics import ExpertStatistics
from orchestrator.train.device.precision import Precision
from orchestrator.train.step_graph.graphs import find_obstacle
from orchestrator.train.strategies.base import Strategy

CPU = torch.device("cpu")


class _Task:
    pass


class _Previewing:
    def prepare_step(self, preview: Any) -> None:
        del preview


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def obstacle(
    model: nn.Module,
    task: Any = None,
    build: Callable[[nn.Module], torch.optim.Optimizer] = fused,
) -> str | None:
    any_task: Any = task or _Task()
    return find_obstacle(Strategy(model, any_task), build(model), Precision("fp32", CPU), CPU)


def with_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda *_: None)
    return nn.Sequential(model)


def with_gradient_hook(model: nn.Linear) -> nn.Module:
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    return model


def with_statistics() -> nn.Module:
    layer = MoELayer(8, [4, 4], 1)
    layer.statistics = ExpertStatistics(2, 8)
    return layer


def with_step_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = fused(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def test_a_plain_model_has_no_obstacle() -> None:
    assert obstacle(nn.Linear(2, 2)) is None
    assert obstacle(MoELayer(8, [4, 4, 4], 2)) is None
    assert obstacle(nn.Linear(2, 2), build=lambda m: torch.optim.SGD(m.parameters(), fused=True)) is None


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (lambda: obstacle(nn.Linear(2, 2), _Previewing()), "prepare_step"),
        (lambda: obstacle(with_hook(nn.Linear(2, 2))), "0 has a hook"),
        (lambda: obstacle(with_gradient_hook(nn.Linear(2, 2))), "weight has a hook"),
        (lambda: obstacle(nn.Linear(2, 2), build=with_step_hook), "AdamW has a hook"),
        (lambda: obstacle(nn.Linear(2, 2), build=lambda m: torch.optim.AdamW(m.parameters())), "kernel"),
        (lambda: obstacle(nn.Linear(2, 2), build=lambda m: torch.optim.RAdam(m.parameters())), "RAdam"),
        (lambda: obstacle(nn.Linear(2, 2).double()), "fp64"),
        (lambda: obstacle(MoELayer(8, [4, 4], 1, jitter=0.1)), "noise"),
        (lambda: obstacle(MoELayer(8, [4, 4], 1, capacity=1.0)), "capacity"),
        (lambda: obstacle(with_statistics()), "may change"),
        (lambda: obstacle(MoELayer(8, [4, 8, 4], 1)), "several sizes"),
        (lambda: obstacle(MoELayer(6, [3, 3], 1)), "in a loop"),
    ],
)
def test_an_obstacle_is_named(found: Callable[[], Any], named: str) -> None:
    assert named in str(found())
