"""Tests of the metrics of a run among those of Ray."""

from __future__ import annotations

import time
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.record.live.metrics import METRICS
from orchestrator.record.live.state import RunState
from orchestrator.runtime.cluster import ray_metrics
from orchestrator.runtime.cluster.ray_metrics import RayMetrics
from tests.support.fakes.fake_events import FakeRun, run_events
from tests.support.hosts.cluster import RayCluster, connected

WAIT_S = 60.0
"""Ray exports every ten seconds."""


def scraped(url: str, run_name: str) -> dict[str, float]:
    """Return the samples of a run by name and labels, without those of Ray."""
    with urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    own_labels = {label for metric in METRICS for label in metric.labels}
    found: dict[str, float] = {}
    for sample in samples:
        if sample.labels.get("run") == run_name:
            labels = sorted((name, text) for name, text in sample.labels.items() if name in own_labels)
            found[f"{sample.name} {labels}"] = sample.value
    return found


@pytest.mark.ray
def test_a_node_of_the_cluster_exports_the_figures(
    shared_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_metrics, "_INTERVAL_SECONDS", 0.5)
    with connected(shared_cluster):
        import ray

        metrics = RayMetrics('run "1"')
        state = RunState()
        for event in run_events(
            FakeRun(experts=7, layers=3, workers=3, hosted=True, gpu=True, recover_at=75)
        ):
            metrics(event)
            state(event)
        expected = {
            f"ray_{metric.name} {sorted(labels)}": value
            for metric in METRICS
            for labels, value in metric.read(state)
        }
        node = next(node for node in ray.nodes() if node["Alive"])
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        found: dict[str, float] = {}
        deadline = time.monotonic() + WAIT_S
        while found.keys() != expected.keys() and time.monotonic() < deadline:
            metrics.publish()
            time.sleep(0.5)
            found = scraped(url, 'run "1"')
    assert found == pytest.approx(expected)


def test_errors_of_the_exporter_end_nothing_and_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no exporter")

    monkeypatch.setattr(ray_metrics, "Gauge", fail)
    metrics = RayMetrics("run-1")
    for event in run_events(FakeRun()):
        metrics(event)
        metrics.publish()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics are not given to Ray any more: RuntimeError: no exporter"
    ]
