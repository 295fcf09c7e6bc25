"""The objective of a sweep: throughput, the validation loss, or any validation metric of the task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.config.metric import Criterion, Metric, find_criterion, known_mode, split_metric
from orchestrator.errors import UserError

THROUGHPUT = "throughput"
VALIDATION_LOSS = "validation_loss"

_ONLY_RESULT = frozenset({
    "learning_rate", "schedule", "warmup_steps", "weight_decay", "decay_biases", "betas", "eps", "momentum",
    "seed",
    "early_stopping_patience", "early_stopping_metric",
})  # fmt: skip
"""Settings that change what is learned, and not how long a step takes."""
_ONLY_SPEED = frozenset({
    "loader_workers", "bucket_cap_mb", "static_graph", "find_unused_parameters", "gradient_as_bucket_view",
    "exchange_chunks", "exchange_rows", "empty_cache_every", "cudnn_benchmark",
})  # fmt: skip
"""Settings that change how long a step takes, and not what is learned."""
_NEITHER = frozenset({
    "checkpoint_every", "snapshot_every", "keep", "log_every", "evaluate_every", "gpu_log_interval",
    "monitor_gpu", "trackers", "metrics_port", "metrics_address", "plots", "profile", "spares",
    "recovery", "max_failures", "collective_timeout", "resource_timeout", "nccl_debug",
})  # fmt: skip
"""Settings of whole runs, which a trial does not use."""


def read_objective(text: str) -> Criterion:
    """Return the figure that compares trials, and its direction. Raise ValueError if it has none."""
    if text == THROUGHPUT:
        return Criterion(THROUGHPUT, "max")
    if text == VALIDATION_LOSS:
        return Criterion(VALIDATION_LOSS, "min")
    name, mode = split_metric(text)
    mode = mode or known_mode(name)
    if mode is None:
        raise ValueError(f"is {text!r}; a direction was needed: {name}:min or {name}:max")
    return Criterion(name, mode)


def complete_objective(text: str, declared: Mapping[str, Metric]) -> str:
    """Return the objective with its direction, as the ledger keeps it: ``accuracy:max``.

    ``declared`` are the directions that the task declares."""
    if text in (THROUGHPUT, VALIDATION_LOSS):
        return text
    criterion = find_criterion(text, declared, "--objective")
    return VALIDATION_LOSS if str(criterion) == "loss:min" else str(criterion)


def check_effect(objective: str, varied: Iterable[str]) -> None:
    """Raise UserError for a swept setting that cannot change the objective: noise would choose it."""
    by_throughput = objective == THROUGHPUT
    without_effect = _ONLY_RESULT if by_throughput else _ONLY_SPEED
    for name in varied:
        if name in _NEITHER:
            raise UserError(f"{name} changes no result of a trial, whatever the objective; leave it out")
        if name in without_effect:
            other = f"{VALIDATION_LOSS} or a metric, such as accuracy" if by_throughput else THROUGHPUT
            raise UserError(
                f"{name} cannot change the objective {objective}: the trials would differ by noise alone; "
                f"use --objective {other}, or leave {name} out"
            )
