"""Metrics: their direction, and those that are computed from a state of their own.

One rule for everything that ranks by a metric: early stopping, the best checkpoint, sweeps, reports.
A direction is given with the name (``mae:min``), declared by the task (``Metric(mode="min")``), or
known from the name. It is never guessed.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import UserError

Mode = Literal["min", "max"]
Reduction = Literal["sum", "gather"]

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


class Metric:
    """A metric of a task: ``mode`` is ``min`` if smaller values are better, ``max`` if larger ones are.

    ``Metric(mode="min")`` gives the direction of a metric that the loss returns as a sum. A metric of
    any other kind is a subclass with ``update`` and ``compute``::

        class Largest(Metric):
            def __init__(self):
                super().__init__("max")
                self.add_state("values", reduce="gather")

            def update(self, values_B):
                self.values.append(values_B)

            def compute(self):
                return self.values.max()

    The loss then returns the arguments of ``update`` as a tuple: ``Loss(..., metrics={"largest": (x,)})``.
    """

    _starts: Mapping[str, tuple[Any, Reduction]] = MappingProxyType({})

    def __init__(self, mode: Mode | None = None) -> None:
        """Without ``mode`` the direction is that of the metric's name, if it is a usual one."""
        if mode is not None and mode not in get_args(Mode):
            raise UserError(f"Metric(mode={mode!r}): the mode must be 'min' or 'max'")
        self.mode: Mode | None = mode

    def add_state(self, name: str, start: Any = None, reduce: Reduction = "sum") -> None:
        """Declare an attribute that ``update`` changes, and how the workers' values become one.

        ``sum`` adds tensors; ``start`` is the tensor to begin with. ``gather`` begins with an empty
        list, to which ``update`` appends tensors of one row per sample; ``compute`` finds a tensor
        with the rows of all workers, in any order."""
        is_tensor = hasattr(start, "clone")  # known by name: settings are read without torch
        fits = is_tensor if reduce == "sum" else start is None
        if reduce not in get_args(Reduction) or not fits:
            raise UserError(
                f"add_state({name!r}, start={start!r}, reduce={reduce!r}): a sum needs a tensor to start "
                "with, such as torch.zeros(()), and gather needs none"
            )
        self._starts = {**self._starts, name: (start, reduce)}
        setattr(self, name, [] if reduce == "gather" else start)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of a batch to the state."""
        del args, kwargs
        raise NotImplementedError

    def compute(self) -> Any:
        """Return the metric, a number, from the state of all workers."""
        raise NotImplementedError

    @property
    def has_state(self) -> bool:
        """Whether the metric is computed from updates; else the loss returns it as a sum."""
        return type(self).update is not Metric.update

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The states by name, and how each is reduced."""
        return {name: reduction for name, (_, reduction) in self._starts.items()}

    def fresh(self, device: Any) -> Metric:
        """Return a copy whose states are at their start, on a device."""
        metric = copy.copy(self)
        for name, (start, reduction) in self._starts.items():
            setattr(metric, name, [] if reduction == "gather" else start.clone().to(device))
        return metric

    def check(self) -> None:
        """Raise UserError for a metric with ``update`` whose states are not declared."""
        if self.has_state and not self.reductions:
            raise UserError(
                f"the metric {type(self).__name__} has an update, and no state is declared: its values would "
                "add up over evaluations, and those of other workers would be lost; declare each attribute "
                'that update changes: self.add_state("total", torch.zeros(())) in __init__'
            )

    def start_of(self, name: str) -> Any:
        """Return what a state begins with."""
        return self._starts[name][0]

    def state(self, name: str) -> Any:
        return getattr(self, name)

    def set_state(self, name: str, value: Any) -> None:
        setattr(self, name, value)


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

    def order(self, value: float, loss: float | None) -> tuple[float, float]:
        """Return the key by which finite results are ordered, the best last; of equal ones the smaller
        loss is better."""
        return self.score(value), -loss if loss is not None and math.isfinite(loss) else -math.inf

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
    metrics = {name: as_metric(metric) for name, metric in declared.items()}
    return {name: metric for name, metric in metrics.items() if metric is not None}


def missing_metric(flag: str, name: str, returned: Collection[str]) -> str:
    """Return the message about a metric that a flag names and the validation does not have."""
    known = ", ".join(dict.fromkeys(["loss", *returned]))
    return f"{flag} {name!r}{did_you_mean(name, returned)} is not among the validation metrics: {known}"


def undeclared_update(name: str) -> str:
    """Return the message about a tuple for which no metric with a state is declared."""
    return (
        f"the loss returns a tuple for the metric {name!r}, and no Metric with update is "
        f'declared for it; declare one, as metrics={{"{name}": F1()}}, or return a sum'
    )


def missing_update(name: str) -> str:
    """Return the message about a declared metric with a state that gets no values."""
    return (
        f"the metric {name!r} has an update, and the loss returns no values for it; "
        f'return them as a tuple: Loss(..., metrics={{"{name}": (predictions, labels)}})'
    )


def as_metric(value: Any) -> Metric | None:
    """Return a metric, one of torchmetrics included; None for any other object.

    Raise UserError for one whose states cannot be reduced over workers."""
    metric = TorchMetric(value) if TorchMetric.accepts(value) else value
    if not isinstance(metric, Metric):
        return None
    metric.check()
    return metric


def check_metrics(metrics: Any) -> None:
    """Raise UserError unless ``metrics`` maps names to metrics."""
    is_mapping = isinstance(metrics, Mapping)
    if not is_mapping or any(as_metric(value) is None for value in metrics.values()):
        raise UserError(
            f"metrics is {metrics!r}; a mapping of names to metrics is needed: "
            '{"churn": Metric(mode="min"), "f1": F1()}'
        )


class TorchMetric(Metric):
    """A metric of torchmetrics, which need not be installed: its attributes are known by name."""

    def __init__(self, metric: Any) -> None:
        higher_is_better = getattr(metric, "higher_is_better", None)
        modes: Mapping[Any, Mode] = {True: "max", False: "min"}
        super().__init__(modes.get(higher_is_better))
        self._metric = metric

    @staticmethod
    def accepts(value: Any) -> bool:
        names = ("update", "compute", "reset", "_defaults", "_reductions")
        return not isinstance(value, type) and all(hasattr(value, name) for name in names)

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        known: Mapping[str, Reduction] = {"dim_zero_sum": "sum", "dim_zero_cat": "gather"}
        found: dict[str, Reduction] = {}
        for name, function in self._metric._reductions.items():
            reduction = known.get(getattr(function, "__name__", ""))
            if reduction is None:
                raise UserError(
                    f"{type(self._metric).__name__} reduces its state {name!r} over workers by {function!r}; "
                    "states that are summed or gathered were needed"
                )
            found[name] = reduction
        return found

    def check(self) -> None:
        """Raise UserError for a state that is neither summed nor gathered."""
        _ = self.reductions

    def fresh(self, device: Any) -> Metric:
        inner = copy.deepcopy(self._metric)
        inner.reset()
        # The states are reduced here: left on, torchmetrics would add up the workers a second time.
        inner.sync_on_compute = False
        inner._to_sync = False
        return TorchMetric(inner.to(device))

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._metric.update(*args, **kwargs)

    def compute(self) -> Any:
        self._metric._update_count = max(1, getattr(self._metric, "_update_count", 1))
        return self._metric.compute()

    def start_of(self, name: str) -> Any:
        return self._metric._defaults[name]

    def state(self, name: str) -> Any:
        return getattr(self._metric, name)

    def set_state(self, name: str, value: Any) -> None:
        setattr(self._metric, name, value)
