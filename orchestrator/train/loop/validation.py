"""Evaluation of a run on its validation data, the best result so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from orchestrator.config.metric import Criterion, declared_metrics, missing_metric
from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import TrainingFailed
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.tasks.task import Task
from orchestrator.train.data.bad_inputs import ADVICE, find_bad_input
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.loop.training import Training

_MAX_SEARCHED_SAMPLES = 10_000
"""Validation samples that are read again, one by one, to find NaN or infinity. The other workers wait."""


class Validation:
    """Evaluates a run and decides when to stop it early."""

    def __init__(self, training: Training) -> None:
        self._evaluation = training.evaluation
        self._progress = training.progress
        self._patience = training.cadence.patience
        self._criterion = Criterion(training.cadence.metric, training.cadence.mode)
        self._log = training.log
        self._has_warned = False
        self._declared_names = DeclaredNames(training.stepper.strategy.task, training.log)
        average = training.stepper.optimizer.average
        self._model = training.stepper.strategy.model
        self._average = average if average is not None and average.evaluated else None

    @property
    def is_current(self) -> bool:
        """Whether the current step is evaluated already."""
        return self._progress.validation.get("step") == self._progress.step

    @property
    def is_pending(self) -> bool:
        """Whether there is validation data, and the current step is not evaluated yet."""
        return self._evaluation is not None and not self.is_current

    def run(self) -> bool:
        """Evaluate the current step and record the result. Return whether it is the best so far."""
        assert self._evaluation is not None
        progress = self._progress
        with self._average.in_place_of_weights(self._model) if self._average else nullcontext():
            result = self._evaluation()
        if not math.isfinite(result["loss"]) and not self._has_warned:
            self._has_warned = True
            self._warn_of_loss(self._evaluation, result)
        self._declared_names.compare(result["metrics"])
        values = {"loss": result["loss"], **result["metrics"]}
        value = _metric_value(values, self._criterion.name)
        is_better = self._criterion.is_better(value, progress.best_value)
        is_best = is_better or self._breaks_tie(value, result["loss"])
        if is_best:
            progress.best_value = value
            progress.best_loss = result["loss"] if math.isfinite(result["loss"]) else None
            progress.best_step = progress.step
        # Patience follows the metric alone: a loss may go on falling long after accuracy stands still.
        progress.bad_evaluations = 0 if is_better else progress.bad_evaluations + 1
        progress.validation = {**values, "step": progress.step}
        # At the end of an epoch, progress has moved on to the next one already.
        epoch = progress.epoch if progress.position else max(0, progress.epoch - 1)
        self._log.write(kinds.Evaluation(step=progress.step, epoch=epoch, best=is_best, **result))
        return is_best

    def _breaks_tie(self, value: float, loss: float) -> bool:
        """Return whether a result equals the best one by its metric, and has a smaller loss."""
        best = self._progress.best_value
        if best is None or value != best:
            return False
        return self._criterion.order(value, loss) > self._criterion.order(best, self._progress.best_loss)

    def _warn_of_loss(self, evaluation: Evaluation, result: Mapping[str, Any]) -> None:
        """Warn that the validation loss is no number, with the sample that is the cause if one is found."""
        feed = evaluation.feed
        if not feed.world.is_main:
            return
        num_samples = min(result["samples"] + result.get("bad_samples", 0), _MAX_SEARCHED_SAMPLES)
        sentence = find_bad_input(feed.named_samples(0, 0, num_samples), "validation")
        finite = f"the first {num_samples} validation samples are finite, but the model's loss of them is not"
        cause = f"{sentence}. {ADVICE}" if sentence else finite
        message = f"step {self._progress.step}: validation loss {result['loss']}: {cause}"
        self._log.write(kinds.Warned(kind="data", message=message))

    @property
    def out_of_patience(self) -> bool:
        """Whether the last evaluations, as many as the run's patience, brought no better result."""
        return self._patience is not None and self._progress.bad_evaluations >= self._patience


def _metric_value(values: Mapping[str, float], metric: str) -> float:
    if metric not in values:
        raise TrainingFailed(missing_metric("--early-stopping-metric", metric, values))
    return values[metric]


class DeclaredNames:
    """The declared names, which are compared once: at the first result that has the metrics' values.

    Metrics with a state are left out: an evaluation refuses them without values."""

    def __init__(self, task: Task, log: Log) -> None:
        declared = declared_metrics(task)
        self._names = [name for name, metric in declared.items() if not metric.has_state]
        self._log = log

    def compare(self, metrics: Collection[str]) -> None:
        """Warn of declared metrics that are neither the loss nor among those that it returns."""
        returned = ["loss", *metrics]
        unknown = [f"{name!r}{did_you_mean(name, returned)}" for name in self._names if name not in returned]
        self._names = []
        if unknown:
            message = (
                f"metrics declares {', '.join(unknown)}, which the loss does not return; "
                f"the metrics are: {', '.join(returned)}. Use the same name in both"
            )
            self._log.write(kinds.Warned(kind="metric", message=message))
