"""Runs through the Python API that take a second: a linear model on points around three centres."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from orchestrator import Config, Loss, Task, TensorData, Trainer
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import read_events


def blobs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around three centres, and the number of the centre."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 3 * F.one_hot(labels, 4), labels


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def settings(folder: Path, **more: Any) -> Config:
    defaults = {
        "run_dir": folder / "run",
        "epochs": 3,
        "batch_size": 16,
        "trackers": (),
        "monitor_gpu": False,
    }
    return Config.of(**defaults | more)


def trainer(
    config: Config,
    data: Any = None,
    loss: Callable[[Any, Any], Any] = cross_entropy,
    model: nn.Module | None = None,
    **parts: Any,
) -> Trainer:
    """Return a trainer of a linear model on 32 samples, unless given otherwise."""
    return Trainer(
        model or nn.Linear(4, 3), data=data or blobs(32), loss=loss, config=config, quiet=True, **parts
    )


def events_of(folder: Path) -> list[Event]:
    return read_events(folder / "run" / "events.jsonl")


class Blobs(Task):
    """A task written as a class."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def train_data(self) -> TensorData:
        return TensorData(*blobs(100))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        loss_sum = F.cross_entropy(logits, batch[1], reduction="sum")
        return Loss(loss_sum, len(logits), {"margin": logits.max(-1).values.sum()})
