"""The parts, the intervals and the hooks that a training loop is constructed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.checkpoint.progress import Progress
from orchestrator.config.metric import Mode
from orchestrator.live.callbacks.callback_values import ModelMoment
from orchestrator.record.files.log import Log
from orchestrator.record.machine.monitor import Sample
from orchestrator.train.checkpoint.digests import Digests
from orchestrator.train.checkpoint.snapshots import Snapshots
from orchestrator.train.checkpoint.writer import CheckpointWriter, NoCheckpoints
from orchestrator.train.data.steps import Feed
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.requests import Requests
from orchestrator.train.stepper import Stepper


@dataclass(frozen=True)
class Cadence:
    """Intervals of a run in steps; 0 means at the end of each epoch."""

    total_steps: int | None
    """None where only the end of the data ends an epoch."""
    epochs: int
    log_every: int
    evaluate_every: int = 0
    checkpoint_every: int = 0
    monitor_every: int = 0
    """0 means never."""
    empty_cache_every: int = 0
    """0 means never."""
    patience: int | None = None
    """Evaluations without a better result before the run stops early."""
    metric: str = "loss"
    """The validation metric that decides which result is best."""
    mode: Mode = "min"
    """Whether smaller or larger values of the metric are better."""


@dataclass(frozen=True)
class Training:
    """The parts that a loop trains with. ``progress`` is the point it starts from."""

    stepper: Stepper
    feed: Feed
    cadence: Cadence
    progress: Progress
    log: Log
    checkpoints: CheckpointWriter | NoCheckpoints
    heartbeat: Heartbeat
    evaluation: Evaluation | None = None
    snapshots: Snapshots | None = None
    """Only hosts that can be replaced take snapshots."""
    evolution: Evolution | None = None
    """Only where experts may change during training."""
    digests: Digests | None = None
    """Only of a reproducible run."""

    def close(self) -> None:
        """End the threads and processes: checkpoint writer, data loaders, compiler log."""
        self.checkpoints.close()
        self.feed.close()
        if self.evaluation is not None:
            self.evaluation.feed.close()
        if self.stepper.compiled is not None:
            self.stepper.compiled.close()
        self.stepper.strategy.close()


@dataclass(frozen=True)
class LoopHooks:
    """Connections of a loop to the code around it."""

    take_requests: Callable[[], Requests] = Requests
    """Returns the requests of the user and of callbacks since the last call."""
    after_step: Callable[[int], None] = lambda step: None  # noqa: ARG005
    show_model: Callable[[ModelMoment, Progress], None] | None = None
    """Lets callbacks look at the model; None where none does."""
    monitor: Callable[[], Sample] | None = None
    """Returns the newest reading of the machine's memory and utilisation."""
