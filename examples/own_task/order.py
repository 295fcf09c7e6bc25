"""A task for the command line, in a package of its own.

cd examples && orchestrator train --task own_task.order:Order --epochs 5
"""

import torch
from torch import nn

from orchestrator import F1, Config, Loss, Task, TensorData
from own_task.data import sequences


class Order(Task):
    """Decides whether six numbers are sorted."""

    metrics = {"f1": F1()}

    def __init__(self, config: Config) -> None:
        self.width = config.model.width or 32

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def train_data(self) -> TensorData:
        return sequences(4000, seed=0)

    def validation_data(self) -> TensorData:
        return sequences(1000, seed=1)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        numbers, is_sorted = batch
        logits = model(numbers)
        total = nn.functional.cross_entropy(logits, is_sorted, reduction="sum")
        correct = (logits.argmax(-1) == is_sorted).sum()
        return Loss(total, len(numbers), {"accuracy": correct, "f1": (logits, is_sorted)})
