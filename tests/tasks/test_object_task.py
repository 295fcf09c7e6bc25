"""Tests of a task made of objects."""

import torch
from torch import nn

from orchestrator.tasks.object_task import ObjectTask


def test_each_model_is_a_copy() -> None:
    model = nn.Linear(2, 2)
    task = ObjectTask(model, data=(torch.zeros(4, 2),), loss=lambda model, batch: model(batch[0]).sum())
    copied = task.build_model()
    with torch.no_grad():
        copied.weight.zero_()
    assert model.weight.abs().sum() > 0
    assert task.build_model() is not copied


def test_missing_parts_have_the_defaults_of_a_task() -> None:
    task = ObjectTask(
        nn.Linear(2, 2), data=(torch.zeros(4, 2),), loss=lambda model, batch: model(batch[0]).sum()
    )
    assert task.validation_data() is None
    assert task.build_optimizer([]) is None
    assert task.schedule() is None
    assert (task.unit, task.units_per_sample) == ("samples", 1)
