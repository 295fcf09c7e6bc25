"""The layer of ``spmd_layer.py`` as a task: same sizes, tokens and loss; the input's gradient is
computed too.

Shapes: T tokens, D width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parallel.spmd_layer import EXPERTS, HIDDEN, TOKENS, TOP_K, WIDTH
from experts.model import initialise
from experts.moe.layer import MoELayer
from orchestrator.config.settings import Config
from orchestrator.tasks.task import Loss, Task, TensorData


class OneLayer(Task):
    """A sample is a token; a host takes 2,048 of them a step. The loss counts its features."""

    unit = "features"
    units_per_sample = WIDTH

    def __init__(self, config: Config) -> None:
        workers = config.parallel.workers
        self.samples = TOKENS * (workers if isinstance(workers, int) else 1)

    def build_model(self) -> nn.Module:
        layer = MoELayer(WIDTH, [HIDDEN] * EXPERTS, TOP_K)
        self.initialise(layer)
        return layer

    def initialise(self, model: nn.Module) -> None:
        initialise(model, 0)

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(1000)
        return TensorData(*torch.randn(2, self.samples, WIDTH, generator=generator))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        x_TD, target_TD = batch
        output_TD, routing = model(x_TD.detach().requires_grad_())
        total = (output_TD - target_TD).square().sum()
        return Loss(total, target_TD.numel(), loads=(routing.counts_E,))
