"""The metrics of a run in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from orchestrator.live.metrics.metrics import METRICS
from orchestrator.record.live.state import RunState


def exposition(state: RunState, run_name: str) -> bytes:
    """Return all metrics of a run as text."""
    return generate_latest(_Families(state, run_name))


class _Families(Collector):
    """The metrics of a state that have a sample, as the library wants them."""

    def __init__(self, state: RunState, run_name: str) -> None:
        self._state = state
        self._run_name = run_name

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            # The library adds the suffix to the names of counters again.
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for labels, value in metric.read(self._state):
                family.add_sample(metric.name, {"run": self._run_name, **dict(labels)}, value)
            if family.samples:
                yield family
