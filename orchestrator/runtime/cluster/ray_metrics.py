"""Metrics of a run among those of Ray, whose exporter on each node Prometheus scrapes.

Ray adds ``ray_`` to the names. Its own labels (node, job, session) come with each sample."""

from __future__ import annotations

from time import monotonic

from ray.util.metrics import Gauge

from orchestrator.record.events import Event
from orchestrator.record.live.metrics import METRICS
from orchestrator.record.live.state import RunState

_INTERVAL_SECONDS = 2.0


class RayMetrics:
    """A listener of events that sets gauges of Ray every few seconds, in the driver's process."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._state = RunState()
        self._gauges: dict[str, Gauge] = {}
        self._next_s = 0.0

    def __call__(self, event: Event) -> None:
        self._state(event)
        is_last = event["event"] == "end"
        if is_last or monotonic() >= self._next_s:
            self._set_all()
            self._next_s = monotonic() + _INTERVAL_SECONDS

    def _set_all(self) -> None:
        for metric in METRICS:
            for labels, value in metric.read(self._state):
                gauge = self._gauges.get(metric.name)
                if gauge is None:
                    # A counter is a gauge here: the record of a run has its count, which Ray's cannot take.
                    gauge = Gauge(metric.name, metric.help, ("run", *metric.labels))
                    self._gauges[metric.name] = gauge
                gauge.set(value, {"run": self._run_name, **dict(labels)})
