"""Settings of what a run leaves behind: checkpoints, and what is measured, logged and shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.config.checks import at_least

Tracker = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept of a run, and where a run begins."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end of each epoch."""
    snapshot_every: int = 10
    """Expert parallel: steps between copies of the hosts' state in memory, from which a run goes on when a host is lost; 0: from
    checkpoints alone."""
    keep: int = 3
    """Checkpoints kept besides the best one."""
    resume: str | None = None
    """Continue: auto takes the newest good checkpoint of the run folder (or starts afresh), PATH a given one."""
    init_from: Path | None = None
    """Begin with the weights of this checkpoint, and nothing else of it."""

    def __post_init__(self) -> None:
        at_least("checkpoint_every", self.checkpoint_every, 0)
        at_least("snapshot_every", self.snapshot_every, 0)
        at_least("keep", self.keep, 1)
        if self.resume is not None and self.init_from is not None:
            raise ValueError(
                "resume and init_from contradict each other: resume continues a run, init_from begins one; give one of them"
            )


@dataclass(frozen=True)
class WatchSettings:
    """What is measured, logged and shown."""

    log_every: int | None = None
    """Steps between fetches of the losses from the device."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of each epoch."""
    monitor_gpu: bool = True
    """Sample device and host use in the background."""
    gpu_log_interval: int = 50
    """Steps between monitor events; 0 turns them off."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Trackers that read along; wandb and mlflow are extras. Give "--trackers" alone for none."""
    profile: bool = False
    """Trace a few steps: trace.json and the table of the most expensive operations."""

    def __post_init__(self) -> None:
        at_least("log_every", self.log_every, 1)
        at_least("evaluate_every", self.evaluate_every, 0)
        at_least("gpu_log_interval", self.gpu_log_interval, 0)
