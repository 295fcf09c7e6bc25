"""Settings of the outputs of a run: checkpoints, logs, measurements and trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.config.sections.checks import at_least, within

Tracker = Literal["tensorboard", "wandb", "mlflow"]
Plots = Literal["end", "off"]
CallbackErrors = Literal["warn", "raise"]


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints and snapshots of a run, and the checkpoint that a run begins with."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end of each epoch."""
    snapshot_every: int | Literal["auto"] = "auto"
    """Live recovery: steps between snapshots of the hosts' state in memory, from which a run
    continues after the loss of a host; auto: as often as 2% of the time allows, as measured; 0:
    from checkpoints only."""
    keep: int = 3
    """Checkpoints kept besides the best one."""
    keep_last: bool = False
    """End with the weights of the last step instead of those with the best validation result
    (--early-stopping-metric). The last checkpoint is kept in any case: a resumed run continues from it."""
    resume: str | None = None
    """Continue a run with the settings of its folder; settings given again win, and differences are
    shown. auto: the run in the folder that --name or --run-dir names, from its newest good
    checkpoint; a new run if the folder has none. PATH or address: a checkpoint, or a run folder
    with some; the run continues in a folder of its own."""
    init_from: Path | None = None
    """Begin with the weights of this checkpoint (path or address), without its optimizer state
    and its progress."""

    def __post_init__(self) -> None:
        at_least("checkpoint_every", self.checkpoint_every, 0)
        if self.snapshot_every != "auto":
            at_least("snapshot_every", self.snapshot_every, 0)
        at_least("keep", self.keep, 1)


@dataclass(frozen=True)
class WatchSettings:
    """Measurements, logs and trackers."""

    log_every: int | None = None
    """Steps between fetches of the losses from the device, and between lines where the output is no
    terminal (default there: ten lines a run)."""
    digest_every: int = 10
    """With --reproducible: steps between digests of weights and optimizer state in the record, with which
    'orchestrator verify' compares; also at each checkpoint. 0: none."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of each epoch."""
    monitor_gpu: bool = True
    """Sample the load of devices and host in the background."""
    gpu_log_interval: int = 50
    """Steps between monitor events; 0 turns them off."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Trackers that receive the metrics; wandb and mlflow are extras. Give "--trackers" alone for none."""
    callbacks: tuple[str, ...] = ()
    """Callbacks of your own, as package.module:Name: called at the start, steps, evaluations,
    checkpoints, failures and end of the run."""
    callback_errors: CallbackErrors = "warn"
    """An exception in a callback: warn shows it and goes on, raise ends the run."""
    metrics_port: int | None = None
    """Serve figures for Prometheus at http://METRICS_ADDRESS:PORT/metrics while the run lasts; 0 takes a
    free port, which the screen shows."""
    metrics_address: str = "127.0.0.1"
    """Address of this machine that --metrics-port listens on; 0.0.0.0 lets other machines read them."""
    plots: Plots = "end"
    """Pictures (training_metrics.png and others): end draws them when the run ends; off leaves them to
    'orchestrator report'. The page has its own charts and is always written."""
    profile: bool = False
    """Trace a few steps: trace.json and the table of the most expensive operations."""

    def __post_init__(self) -> None:
        at_least("log_every", self.log_every, 1)
        at_least("digest_every", self.digest_every, 0)
        at_least("evaluate_every", self.evaluate_every, 0)
        at_least("gpu_log_interval", self.gpu_log_interval, 0)
        within("metrics_port", self.metrics_port or 0, 0, 65535)
        if not self.metrics_address.strip():
            raise ValueError("metrics_address is empty; an address of this machine was needed, as 127.0.0.1")
