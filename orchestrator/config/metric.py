"""The direction of a metric: whether smaller or larger values are better.

One rule for everything that ranks by a metric: early stopping, the best checkpoint, sweeps, reports.
A direction is given with the name (``mae:min``), declared by the task (``Metric(mode="min")``), or
known from the name. It is never guessed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from orchestrator.errors import UserError

Mode = Literal["min", "max"]

_SMALLER_IS_BETTER = frozenset({
    "loss", "error", "err", "mae", "mse", "rmse", "mape", "smape", "msle", "rmsle",
    "nll", "ppl", "perplexity", "crossentropy", "cross_entropy", "bpc", "bpb", "kl",
    "wer", "cer", "ter", "fid", "brier", "ece",
})  # fmt: skip
_LARGER_IS_BETTER = frozenset({
    "accuracy", "acc", "f1", "auc", "auroc", "auprc", "roc_auc", "precision", "recall", "specificity",
    "sensitivity", "bleu", "rouge", "meteor", "iou", "miou", "dice", "map", "ndcg", "mrr", "mcc", "r2",
    "psnr", "ssim", "top1", "top5",
})  # fmt: skip
_OPPOSITES = frozenset(("negative", "neg", "inverse", "drop", "gap"))
"""Words that may turn the meaning of a metric around: with one of them the direction must be given."""


@dataclass(frozen=True)
class Metric:
    """A metric of a task: ``mode`` is ``min`` if smaller values are better, ``max`` if larger ones are."""

    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(f"Metric(mode={self.mode!r}): the mode must be 'min' or 'max'")


@dataclass(frozen=True)
class Criterion:
    """A metric and its direction, by which results are ranked."""

    name: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.name}:{self.mode}"

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a result beats the best so far.

        NaN and infinity are never better, and every number beats them."""
        if not math.isfinite(value):
            return False
        if best is None or not math.isfinite(best):
            return True
        return self.score(value) > self.score(best)

    def score(self, value: float) -> float:
        """Return the value with its sign changed if smaller is better: a larger score is better."""
        return -value if self.mode == "min" else value


def split_metric(text: str) -> tuple[str, Mode | None]:
    """Return the name and the direction of ``NAME``, ``NAME:min`` or ``NAME:max``.

    Raise ValueError for another ending."""
    name, colon, mode = text.rpartition(":")
    if not colon:
        return text, None
    if name and mode == "min":
        return name, "min"
    if name and mode == "max":
        return name, "max"
    raise ValueError(f"is {text!r}; it must be NAME, NAME:min or NAME:max")


def find_criterion(text: str, declared: Mapping[str, Metric], flag: str) -> Criterion:
    """Return the metric that ``text`` names, with its direction; UserError if that is not known.

    ``declared`` are the task's own metrics, ``flag`` the setting, for the message."""
    name, mode = split_metric(text)
    if mode is None and name in declared:
        mode = declared[name].mode
    mode = mode or known_mode(name)
    if mode is None:
        near = difflib.get_close_matches(name, [*declared, *_SMALLER_IS_BETTER, *_LARGER_IS_BETTER], 1, 0.8)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"{flag} {name}{meant}: it is not known whether smaller or larger values of {name!r} are better; "
            f"write {flag} {name}:min or {name}:max, "
            f'or declare it in Python: metrics={{"{name}": Metric(mode="min")}}'
        )
    return Criterion(name, mode)


def known_mode(name: str) -> Mode | None:
    """Return the direction of a usual name such as ``mae``, ``val_loss`` or ``top1_accuracy``, else None."""
    lower = name.lower()
    words = {word for word in re.split(r"[^a-z0-9]+", lower) if word} | {lower}
    smaller = bool(words & _SMALLER_IS_BETTER)
    larger = bool(words & _LARGER_IS_BETTER)
    if words & _OPPOSITES or smaller == larger:
        return None
    return "min" if smaller else "max"


def declared_metrics(task: Any) -> Mapping[str, Metric]:
    """Return the metrics that a task declares; a task may use the name for something else."""
    declared = getattr(task, "metrics", None)
    if not isinstance(declared, Mapping):
        return {}
    return {name: metric for name, metric in declared.items() if isinstance(metric, Metric)}
