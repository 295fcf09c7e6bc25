"""Metrics in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from orchestrator.record.live.metrics import METRICS, Metric, Sample
from orchestrator.record.live.state import RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(state: RunState, run_name: str) -> str:
    """Return all metrics of a run as text."""
    return "".join(line for metric in METRICS for line in _lines(metric, metric.read(state), run_name))


def _lines(metric: Metric, samples: Iterable[Sample], run_name: str) -> Iterator[str]:
    """Yield the lines of a metric; none if it has no sample."""
    for index, (labels, value) in enumerate(samples):
        if index == 0:
            yield f"# HELP {metric.name} {_escaped(metric.help)}\n"
            yield f"# TYPE {metric.name} {metric.kind}\n"
        pairs = ",".join(f'{name}="{_escaped_label(text)}"' for name, text in (("run", run_name), *labels))
        yield f"{metric.name}{{{pairs}}} {_number(value)}\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped_label(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
