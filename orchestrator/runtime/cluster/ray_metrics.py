"""Metrics of a run among those of Ray, whose exporter on each node Prometheus scrapes.

Ray adds ``ray_`` to the names. It exports every ten seconds, and drops a sample that was not set since the
last time. So hosts that left vanish, and figures are set again although no event has come."""

from __future__ import annotations

import logging
import math
from time import monotonic

from ray.util.metrics import Gauge

from orchestrator.record.files.events import Event
from orchestrator.record.live.metrics import METRICS, Metric
from orchestrator.record.live.state import RunState

_INTERVAL_SECONDS = 5.0
_logger = logging.getLogger("orchestrator")


class RayMetrics:
    """A listener of events in the driver's process, which sets gauges of Ray when ``publish`` is called."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._state = RunState()
        self._gauges: dict[str, Gauge] = {}
        self._next_s = 0.0

    def __call__(self, event: Event) -> None:
        self._state(event)

    def publish(self) -> None:
        """Set the gauges if the last time is a few seconds ago."""
        if monotonic() < self._next_s:
            return
        self._next_s = monotonic() + _INTERVAL_SECONDS
        try:
            for metric in METRICS:
                self._set(metric)
        except Exception as error:
            # Ray's metrics must not end a run. They stay away from now on, and the user learns why.
            self._next_s = math.inf
            _logger.warning("metrics are not given to Ray any more: %s: %s", type(error).__name__, error)

    def _set(self, metric: Metric) -> None:
        for labels, value in metric.read(self._state):
            gauge = self._gauges.get(metric.name)
            if gauge is None:
                # Counters are gauges here: Ray's counters take increments, and a state has counts.
                gauge = Gauge(metric.name, metric.help, ("run", *metric.labels))
                self._gauges[metric.name] = gauge
            gauge.set(value, {"run": self._run_name, **dict(labels)})
