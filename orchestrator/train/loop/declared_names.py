"""Compares the names of the metrics that a task declares with those that its loss returns."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.config.metric import declared_metrics
from orchestrator.config.names.nearest import did_you_mean
from orchestrator.record.files.log import Log
from orchestrator.tasks.task import Task


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
            self._log.write("warning", kind="metric", message=message)
