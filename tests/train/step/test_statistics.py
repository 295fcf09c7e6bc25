"""A step that is repeated for lack of memory counts once in the statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experts.balance import moe_layers
from experts.moe.statistics import ExpertStatistics
from harness.runs.host_runs import step_batches
from harness.runs.steppers import make_stepper
from harness.runs.tiny_model import Tiny
from orchestrator.tasks.task import Loss


class FailsOnce(Tiny):
    """A task whose first pass ends with an error of memory, after the layers have counted."""

    failed = False

    def loss(self, model: torch.nn.Module, batch: Any) -> Loss:
        result = super().loss(model, batch)
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result


@pytest.mark.parametrize("fails", [False, True])
def test_a_repeated_step_counts_its_tokens_once(fails: bool) -> None:
    FailsOnce.failed = not fails
    task = FailsOnce(((4, 4, 4),), samples=12)
    stepper, feed = make_stepper(task, 12, 12)
    ((_, layer),) = moe_layers(stepper.strategy.model)
    layer.statistics = ExpertStatistics(3, task.width).double()
    stepper.experts_changed()
    stepper.strategy.context.observing = True
    statistics = layer.statistics
    assert isinstance(statistics, ExpertStatistics)
    statistics.begin_step()
    (batch,) = step_batches(feed, 1)
    stepper.run(batch, 0)
    assert statistics.local_sums[0] == 12, "tokens"
    assert statistics.local_sums[2:5].sum() == 24, "choices"
    sampled = statistics.priority_P < torch.iinfo(torch.int64).max
    assert int(sampled.sum()) == 12
    assert FailsOnce.failed
