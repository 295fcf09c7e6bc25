"""Evaluation of a run on its validation data, the best result so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from orchestrator.config.metric import Criterion, missing_metric
from orchestrator.errors import TrainingFailed
from orchestrator.train.data.bad_inputs import ADVICE, find_bad_input
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.loop.declared_names import DeclaredNames
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
        with self._average.in_place_of_weights() if self._average else nullcontext():
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
        self._log.write("evaluate", step=progress.step, epoch=epoch, best=is_best, **result)
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
        self._log.write("warning", kind="data", message=message)

    @property
    def out_of_patience(self) -> bool:
        """Whether the last evaluations, as many as the run's patience, brought no better result."""
        return self._patience is not None and self._progress.bad_evaluations >= self._patience


def _metric_value(values: Mapping[str, float], metric: str) -> float:
    if metric not in values:
        raise TrainingFailed(missing_metric("--early-stopping-metric", metric, values))
    return values[metric]
