"""The strategy with the same bits on any number of workers, in one process."""

from __future__ import annotations

import torch

from experts.balance import moe_layers
from harness.runs.tiny_model import Tiny
from orchestrator.train.group.world import World
from orchestrator.train.strategies.reproducible import ReproducibleStrategy

TASK = Tiny(((8, 8, 12),), dtype=torch.float32)


def test_a_model_can_be_trained_further_by_its_owner() -> None:
    model = TASK.build_model()
    strategy = ReproducibleStrategy(model, TASK, World.single_process(), divided=False)
    strategy.close()
    TASK.loss(model, TASK.train_data().tensors).sum.backward()
    assert all(p.grad is not None for p in model.parameters())
    (layer,) = (layer for _, layer in moe_layers(model))
    assert not layer.context.by_choice
    # The same module may be given to a second run.
    ReproducibleStrategy(model, TASK, World.single_process(), divided=False)
