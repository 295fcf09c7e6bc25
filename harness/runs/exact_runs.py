"""Settings, tasks and checks of runs whose bits do not depend on their hosts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.runs.bits import Leg, Run, checkpoints_of, first_difference, newest_state, run_all, sha256_of
from harness.runs.combinations import Validated
from orchestrator.tasks.task import Task, TensorData

COMMON: dict[str, Any] = {
    "epochs": 100,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "warmup_steps": 0,
    "log_every": 1,
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
    "plots": "off",
}
EXACT: dict[str, Any] = COMMON | {"reproducible": True, "batch_size": 4, "global_batch_size": 18}
ROUNDED: dict[str, Any] = COMMON | {"deterministic": True, "global_batch_size": 18}
EXPERTS = {"parallel_strategy": "expert_parallel"}
DATA = {"parallel_strategy": "data_parallel"}
SIZES = ((8, 8, 12, 8, 8, 7, 20), (8, 12, 8))
"""Hidden sizes that no vector of a CPU divides, and fewer experts than hosts."""


@dataclass(frozen=True)
class Dropped(Validated):
    """The tiny model with dropout before its head."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.head = nn.Sequential(nn.Dropout(0.3), model.head)
        return model


@dataclass(frozen=True)
class Skewed(Validated):
    """Samples that have much in common: one of two experts gets most of them, and so gets copies."""

    def train_data(self) -> TensorData:
        x, labels = super().train_data().tensors
        return TensorData(x + torch.linspace(-4, 4, x.shape[-1], dtype=x.dtype), labels)


def tiny(**options: Any) -> Validated:
    """Return a task whose last batch of an epoch is short: 5 samples of 18, in two micro-batches."""
    return Validated(SIZES, top_k=2, samples=41, dtype=torch.float32, tokens=5, options=options)


DROPPED = Dropped(SIZES, top_k=2, samples=41, dtype=torch.float32, tokens=5)
SKEWED = Skewed(((8, 8),), top_k=1, samples=600, dtype=torch.float32)


def assert_equal(
    folder: Path,
    task: Task | None,
    settings: Mapping[str, Any],
    variants: Mapping[str, Sequence[Leg]],
    steps: int,
) -> dict[str, Path]:
    """Run in one process and as each variant says; all must agree to the bit."""
    runs = {"one process": Run(folder / "one", task, settings, [Leg(1, steps)])}
    for number, (name, legs) in enumerate(variants.items()):
        runs[name] = Run(folder / f"hosts-{number}", task, settings, legs)
    run_all(list(runs.values()))
    folders = {name: run.folder for name, run in runs.items()}
    one = folders["one process"]
    assert max(checkpoints_of(one)) == steps
    found = {name: first_difference(path, one) for name, path in folders.items()}
    assert not any(found.values()), found
    assert len({sha256_of(newest_state(path)) for path in folders.values()}) == 1
    return folders


def random_placement(draw: random.Random, sizes: Sequence[Sequence[int]], num_hosts: int) -> str:
    return json.dumps({"layers": [[draw.randrange(num_hosts) for _ in layer] for layer in sizes]})
