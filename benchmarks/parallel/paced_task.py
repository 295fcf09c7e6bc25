"""A small MoE layer whose steps take a given time, asleep; its hosts write when each step began and
ended.

``benchmarks.parallel.segments`` copies this file beside the code that it measures, which may be another
commit.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn

from experts.model import initialise
from experts.moe.layer import MoELayer
from orchestrator.config.settings import Config
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.train.loop.loop import Loop

WIDTH = 8
SAMPLES = 64


def record_steps(folder: Path) -> None:
    """Make this process write a line for each segment: the times of its steps, begin and end."""
    steps: list[tuple[float, float]] = []
    train_step = Loop._train_step
    run_steps = Loop.run_steps

    def timed_step(loop: Loop, batch: Any) -> Tensor | None:
        begun = time.time()
        votes = train_step(loop, batch)
        steps.append((begun, time.time()))
        return votes

    def timed_steps(loop: Loop, *arguments: Any) -> Any:
        try:
            return run_steps(loop, *arguments)
        finally:
            with (folder / f"steps-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(steps) + "\n")
            steps.clear()

    Loop._train_step = timed_step  # pyrefly: ignore[bad-assignment]
    Loop.run_steps = timed_steps  # pyrefly: ignore[bad-assignment]


class Paced(Task):
    """Each host sleeps in its loss; the work beside it is negligible."""

    step_s = 0.02
    _recording = False

    def __init__(self, config: Config) -> None:
        self.folder = Path(str(config.run.run_dir))

    def build_model(self) -> nn.Module:
        layer = MoELayer(WIDTH, [16] * 4, 2)
        self.initialise(layer)
        return layer

    def initialise(self, model: nn.Module) -> None:
        initialise(model, 0)

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(1)
        return TensorData(*torch.randn(2, SAMPLES, WIDTH, generator=generator))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        # The driver, which is no actor, calls the loss to trace the model.
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            if not Paced._recording:
                Paced._recording = True
                record_steps(self.folder)
            time.sleep(self.step_s)
        x_TD, target_TD = batch
        output_TD, routing = model(x_TD)
        total = (output_TD - target_TD).square().sum()
        return Loss(total, target_TD.numel(), loads=(routing.counts_E,))


class Steps20ms(Paced):
    """Short steps: what comes between them weighs most."""


class Steps3s(Paced):
    """Long steps: each segment has one or two of them."""

    step_s = 3.0
