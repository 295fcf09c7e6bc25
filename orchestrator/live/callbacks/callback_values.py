"""The frozen values that callbacks see, made from the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchestrator.config.settings import Config
from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float

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


Value = StartInfo | StepInfo | EvaluationInfo | CheckpointInfo | FailureInfo | EndInfo


def callback_value(event: Event, run: RunInfo) -> Value:
    """Return an event as the value that callbacks see."""
    return _MAKERS[event["event"]](event, run)


def _start(event: Event, run: RunInfo) -> StartInfo:
    return StartInfo(
        run_dir=run.run_dir,
        config=run.config,
        step=event["step"],
        total_steps=event["total_steps"],
        strategy=event["strategy"],
        workers=event["workers"],
        device=event["device"],
        precision=event["precision"],
        global_batch_size=event["global_batch_size"],
        parameters=event["parameters"],
    )


def _step(event: Event, run: RunInfo) -> StepInfo:  # noqa: ARG001
    return StepInfo(
        step=event["step"],
        epoch=event["epoch"],
        loss=_number(event["loss"]),
        grad_norm=_number(event["grad_norm"]),
        lr=event["lr"],
        samples=event["samples"],
        units=event["units"],
        seconds=event["seconds"],
        metrics=_numbers(event["metrics"]),
    )


def _evaluation(event: Event, run: RunInfo) -> EvaluationInfo:  # noqa: ARG001
    return EvaluationInfo(
        step=event["step"],
        epoch=event["epoch"],
        loss=_number(event["loss"]),
        metrics=_numbers(event["metrics"]),
        samples=event["samples"],
        seconds=event["seconds"],
        best=event["best"],
    )


def _checkpoint(event: Event, run: RunInfo) -> CheckpointInfo:
    return CheckpointInfo(
        step=event["step"],
        path=run.run_dir / event["path"],
        bytes=event["bytes"],
        seconds=event["seconds"],
    )


def _failure(event: Event, run: RunInfo) -> FailureInfo:  # noqa: ARG001
    return FailureInfo(
        kind=event["kind"],
        message=event["message"],
        rank=event["rank"],
        step=event["step"],
        final=bool(event["final"]),
    )


def _end(event: Event, run: RunInfo) -> EndInfo:  # noqa: ARG001
    return EndInfo(
        status=event["status"],
        reason=event["reason"],
        steps=event["steps"],
        seconds=event["seconds"],
    )


_MAKERS: Mapping[str, Any] = {
    "start": _start,
    "step": _step,
    "evaluate": _evaluation,
    "checkpoint": _checkpoint,
    "failure": _failure,
    "end": _end,
}


def _number(value: Any) -> float:
    """Return a number of an event; JSON carries nan and infinity as text."""
    if type(value) is float:
        return value
    number = to_float(value)
    return float("nan") if number is None else number


def _numbers(values: Mapping[str, Any]) -> Mapping[str, float]:
    # A copy that cannot be written: the event itself goes on to other listeners.
    return MappingProxyType({name: _number(value) for name, value in values.items()})
