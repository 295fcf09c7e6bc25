"""The frozen values that callbacks see, made from the events of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import Checkpoint, End, Evaluation, Event, Failure, Start, Step

ModelMoment = Literal["step", "evaluate", "checkpoint"]


@dataclass(frozen=True)
class RunInfo:
    """The run: its folder and its settings."""

    run_dir: Path
    config: Config


@dataclass(frozen=True)
class StartInfo:
    """The start of a run, or of the part of it that follows a resume."""

    run_dir: Path
    config: Config
    step: int
    """Steps done already: 0, or those of the checkpoint that the run resumes from."""
    total_steps: int | None
    """None where only the end of the data ends an epoch, and no limit is set."""
    strategy: str
    workers: int
    device: str
    precision: str
    global_batch_size: int
    parameters: int


@dataclass(frozen=True)
class StepInfo:
    """A finished step. Its figures are those of the global batch."""

    step: int
    epoch: int
    """From 0."""
    loss: float
    grad_norm: float
    lr: float
    samples: int
    units: float
    """Samples, or the tokens that were computed: samples times the task's ``units_per_sample``. Of a task
    that has no such number, what its loss is a mean over."""
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluationInfo:
    """An evaluation on the validation data."""

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    best: bool
    """Whether it is the best result so far."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that is safe on disk."""

    step: int
    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class FailureInfo:
    """A failure. The run continues after it, unless it is final."""

    kind: str
    message: str
    rank: int | None
    """The worker that failed, where one is known."""
    step: int
    final: bool


@dataclass(frozen=True)
class EndInfo:
    """The end of a run."""

    status: str
    """completed, stopped or failed."""
    reason: str
    steps: int
    seconds: float


@dataclass(frozen=True)
class ModelInfo:
    """A moment between two steps at which ``on_model`` sees the model."""

    run_dir: Path
    config: Config
    step: int
    """Steps done."""
    epoch: int
    """From 0; at the end of an epoch, that of the next step."""
    after: ModelMoment
    """What was just done: a step, an evaluation, or the copy of the state for a checkpoint."""


HOOKS: Mapping[type[Event], tuple[str, type[Any]]] = {
    Start: ("on_start", StartInfo),
    Step: ("on_step", StepInfo),
    Evaluation: ("on_evaluate", EvaluationInfo),
    Checkpoint: ("on_checkpoint", CheckpointInfo),
    Failure: ("on_failure", FailureInfo),
    End: ("on_end", EndInfo),
}
"""The method of a callback for each kind of event, and the value that it gets."""


def callback_value(event: Event, run: RunInfo) -> Any:
    """Return an event as the value that callbacks see."""
    _, info = HOOKS[type(event)]
    values = vars(run) | vars(event)
    if isinstance(event, Checkpoint):
        values["path"] = run.run_dir / str(event.path)
    if isinstance(event, Step | Evaluation):
        # A copy that cannot be written: the event itself goes on to other listeners.
        values["metrics"] = MappingProxyType(dict(event.metrics))
        values |= {name: math.nan for name in ("loss", "grad_norm") if values.get(name) is None}
    return info(**{field.name: values[field.name] for field in fields(info)})
