"""Tests of the Grafana dashboard and the page about metrics: they name the metrics that a run exports."""

from __future__ import annotations

import json
import re
from typing import Any

from harness.docs.documents import ROOT
from orchestrator.live.metrics.metrics import METRICS

DASHBOARD = ROOT / "cluster" / "grafana" / "dashboard.json"
SELECTOR = re.compile(r'([a-z_]+)\{run=~"\$run"\}')
LABEL = re.compile(r"\{\{(\w+)\}\}")
METRIC_OF = {metric.name: metric for metric in METRICS}


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def queries() -> list[tuple[str, str]]:
    """Return each query with the text of its legend."""
    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    return [(target["expr"], target["legendFormat"]) for target in targets]


def test_every_query_selects_exported_metrics() -> None:
    for query, _ in queries():
        names = SELECTOR.findall(query)
        assert names, query
        assert set(names) <= METRIC_OF.keys(), query
        # Besides selectors there is arithmetic alone: another way to name a metric would not be checked.
        assert not re.search(r"[a-z]", SELECTOR.sub("", query)), query


def test_every_legend_shows_labels_that_the_metric_has() -> None:
    for query, legend in queries():
        for name in SELECTOR.findall(query):
            assert set(LABEL.findall(legend)) <= {"run", *METRIC_OF[name].labels}, (query, legend)
            assert set(METRIC_OF[name].labels) - {"name"} <= set(LABEL.findall(legend)), (query, legend)


def test_the_variable_lists_the_runs_of_an_exported_metric() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables.keys() == {"datasource", "run"}
    (name,) = re.findall(r"label_values\(([a-z_]+), run\)", variables["run"]["query"]["query"])
    assert name in METRIC_OF


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)


def test_the_page_lists_every_metric_as_the_code_does() -> None:
    text = (ROOT / "docs" / "live-view.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(orchestrator_\w+)` \| (\w+) \| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    expected = [
        (metric.name, metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.help)
        for metric in METRICS
    ]
    assert rows == expected
