"""Tests of the buffers of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestrator.errors import UserError
from orchestrator.train.strategies.buffers import (
    convert_sync_batchnorm,
    persistent_buffers,
    running_statistics,
)


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
