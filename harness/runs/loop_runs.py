"""Runs of the loop alone: no screen, no report, no monitor; and a model that counts its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.runs.records import by_step
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import read_events
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.loop.training import LoopHooks, Training
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.trainer import Trainer

SMALL: dict[str, Any] = {
    "width": 8,
    "expert_hidden_size": (4, 8, 4),
    "experts": 3,
    "layers": 1,
    "evolution": "off",
    "batch_size": 16,
    "log_every": 1,
    # A constant learning rate, so that a shorter run begins like a longer one.
    "schedule": "constant",
    "warmup_steps": 0,
}


class StepCounter(nn.Module):
    """A model that counts its training steps in a buffer, and so in its checkpoint."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
        return x * self.weight


def build_small_training(
    run_dir: Path,
    log: EventLog,
    task: Any = None,
    heartbeat: Heartbeat | None = None,
    **settings: Any,
) -> Training:
    config = Config.of(**SMALL | {"run_dir": run_dir} | settings)
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    world = World.single_process()
    return build_training(WorkerContext(prepared, world, run_dir, log, heartbeat or Heartbeat()))


def run_loop(
    run_dir: Path, task: Any = None, hooks: LoopHooks | None = None, **settings: Any
) -> tuple[Loop, list[float]]:
    """Run the loop in a folder. Return it and the losses of all steps that the folder records."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = EventLog(run_dir / "events.jsonl")
    loop = Loop(build_small_training(run_dir, log, task, **settings), hooks)
    loop.run()
    log.close()
    return loop, losses_in(run_dir)


def losses_in(run_dir: Path) -> list[float]:
    return [event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))]
