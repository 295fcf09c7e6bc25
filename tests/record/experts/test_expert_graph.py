"""Tests of the graph of experts that a run records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.fakes.fake_evolution import EVOLVING, FINAL_IDS, evolving_events
from harness.runs.records import decoded, made
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.experts.expert_changes import checked_graph, expert_graphs, graph_of_epochs

EXPERT = {"id": 4, "size": 64, "share": 0.25, "hosts": [0, 2], "age": 10, "parents": [1], "warming": True}


def graph_event(*layers: Any, step: Any = 30, **fields: Any) -> Event:
    return {"event": "expert_graph", "step": step, "epoch": 0, "layers": list(layers), **fields}


def layer_fields(*experts: Any, **fields: Any) -> dict[str, Any]:
    return {"layer": 0, "name": "ffn", "experts": list(experts), **fields}


def test_every_field_of_a_graph_is_read() -> None:
    pairs = {"coactivation": [[4, 1, 0.5]], "similarity": [[1, 4, -0.25]]}
    graph = checked_graph(made(graph_event(layer_fields(EXPERT, EXPERT | {"id": 1}, **pairs), epoch=2)))
    assert (graph.step, graph.shown_epoch) == (30, 3), "people count epochs from 1"
    layer = graph.layer(0)
    assert layer is not None
    assert (layer.name, layer.ids) == ("ffn", (4, 1))
    expert = layer.experts[0]
    assert (expert.size, expert.share, expert.hosts, expert.age) == (64, 0.25, (0, 2), 10)
    assert (expert.parents, expert.warming) == ((1,), True)
    assert [(pair.first, pair.second, pair.value) for pair in layer.coactivation] == [(4, 1, 0.5)]
    assert [(pair.first, pair.second, pair.value) for pair in layer.similarity] == [(1, 4, -0.25)]
    assert graph.layer(1) is None


def test_the_last_graph_of_an_epoch_is_its_graph() -> None:
    graphs = expert_graphs(decoded(evolving_events()))
    assert [(graph.step, graph.shown_epoch) for graph in graphs] == [
        (30, 1),
        (50, 2),
        (60, 2),
        (80, 3),
        (90, 3),
        (120, 4),
    ]
    assert {epoch: graph.step for epoch, graph in graph_of_epochs(graphs).items()} == {
        1: 30,
        2: 60,
        3: 90,
        4: 120,
    }
    assert tuple(tuple(sorted(layer.ids)) for layer in graphs[-1].layers) == FINAL_IDS


def test_graphs_repeated_after_a_restart_count_once() -> None:
    repeated = expert_graphs(decoded(evolving_events(replace(EVOLVING, resume_at=85))))
    assert [graph.step for graph in repeated] == [30, 50, 60, 80, 90, 120]
    discarded = [graph_event(step=20), graph_event(step=30), {"event": "start", "step": 25}]
    assert [graph.step for graph in expert_graphs(decoded(discarded))] == [20]


@pytest.mark.parametrize(
    "layers",
    [
        None,
        "x",
        [None, 3, {}],
        [{"layer": 0, "experts": []}],
        [{"layer": -1, "experts": [EXPERT]}],
        [{"layer": 0, "experts": [{"id": "x"}, None]}],
    ],
)
def test_layers_without_experts_are_left_out(layers: Any) -> None:
    assert checked_graph(made(graph_event() | {"layers": layers})).layers == ()


def test_malformed_values_are_harmless() -> None:
    odd = {"id": 0, "size": "x", "share": 7, "hosts": "x", "age": -1, "parents": [None], "warming": 1}
    pairs = [[0, 1, 0.5], [0, 9, 0.5], [0, 0, 1], [0, 1], "x", [0, 1, "nan"], [0, 1, 5], [0, True, 1]]
    graph = checked_graph(made(graph_event(layer_fields(odd, {"id": 1}, coactivation=pairs), epoch="x")))
    expert = graph.layers[0].experts[0]
    assert (expert.size, expert.share, expert.hosts, expert.age) == (None, 1.0, (), 0)
    assert (expert.parents, expert.warming) == ((), False)
    assert [pair.value for pair in graph.layers[0].coactivation] == [0.5, 1.0]
    assert graph.shown_epoch == 1
    assert expert_graphs(decoded([graph_event(step=None), graph_event(step="x")])) == []
