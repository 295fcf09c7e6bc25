"""Tests of the buffers of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.balance import gated_layers
from experts.model import place
from harness.hosts.ranks import run_ranks
from harness.runs.tiny_model import Tiny
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.strategies.buffers import (
    convert_sync_batchnorm,
    persistent_buffers,
    running_statistics,
)
from orchestrator.train.strategies.ddp import DDPStrategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    model.register_buffer("mask", torch.ones(2))
    model.register_buffer("host_of", torch.zeros(2), persistent=False)
    return model


def same_tensors(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return {id(tensor) for tensor in tensors} == {id(tensor) for tensor in expected}


def test_buffers_outside_the_state_are_not_shared() -> None:
    model = make_model()
    names = ("mask", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert same_tensors(persistent_buffers(model), [model.get_buffer(name) for name in names])


def test_running_statistics_are_those_of_batch_norms() -> None:
    model = make_model()
    names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert same_tensors(running_statistics(model), [model.get_buffer(name) for name in names])


def test_sync_batchnorm_needs_batch_norm() -> None:
    with pytest.raises(UserError, match="no batch norm"):
        convert_sync_batchnorm(nn.Linear(2, 2))


def bias_after_a_change(rank: int, size: int, store: str, kind: str) -> list[float]:
    """The bias of a gate that a change of the experts has replaced, when the next step begins."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        task = Tiny(((4, 4, 4),))
        model = task.build_model()
        if kind == "expert parallel":
            place(model, [(0, 1, 0)], rank)
            strategy = ExpertParallelStrategy(model, task, world, buffers=persistent_buffers)
        else:
            settings = Config().parallel
            strategy = DDPStrategy(model, task, world, settings, lambda _: None, persistent_buffers)
        ((_, layer),) = gated_layers(model)
        layer.gate.bias_E = torch.full((3,), float(rank), dtype=torch.float64)
        strategy.experts_changed()
        strategy.begin_step(all_have_samples=True)
        return layer.gate.bias_E.tolist()


@pytest.mark.parametrize("kind", ["data parallel", "expert parallel"])
def test_buffers_of_changed_experts_are_broadcast(kind: str) -> None:
    assert run_ranks(bias_after_a_change, 2, kind) == [[0.0] * 3, [0.0] * 3]
