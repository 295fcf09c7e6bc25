"""A look at a step before it is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.errors import UserError
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World
from orchestrator.train.step.preview import Preview


def preview(reproducible: bool) -> Preview:
    strategy: Any = SimpleNamespace(reproducible=reproducible)
    world = World.single_process()
    return Preview(
        StepBatch([], 0, all_have_samples=True), strategy, world, Precision("fp32", world.device), 1, 0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_counts_are_added_up_in_their_type(dtype: torch.dtype) -> None:
    counts = torch.tensor([3, 0, -(2**20)]).to(dtype)
    for reproducible in (False, True):
        total = preview(reproducible).all_reduce(counts)
        assert total.dtype == dtype
        assert torch.equal(total, counts)


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_sums_that_follow_the_workers_are_refused_in_a_reproducible_run(value: float) -> None:
    numbers = torch.tensor([3.0, value])
    assert torch.equal(preview(False).all_reduce(numbers).nan_to_num(), numbers.nan_to_num())
    with pytest.raises(UserError, match=f"adds up {value} over the workers, and with --reproducible"):
        preview(True).all_reduce(numbers)
