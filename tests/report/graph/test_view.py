"""Tests of the shapes of the graph of experts."""

from __future__ import annotations

import math

import pytest

from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import decoded
from orchestrator.record.events.kinds import ExpertGraph
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.experts.expert_changes import expert_changes
from orchestrator.record.experts.expert_graph import expert_graphs
from orchestrator.report.graph.view import MAX_EDGES, MAX_LAYERS, GraphView, LayerView, graph_views, spread


def views_of(events: list[Event], selected: list[ExpertGraph] | None = None) -> list[GraphView]:
    graphs = expert_graphs(decoded(events))
    return graph_views(graphs, expert_changes(decoded(events)), graphs if selected is None else selected)


def layer_view(view: GraphView, index: int = 0) -> LayerView:
    layer = view.layers[index]
    assert layer is not None
    return layer


def graph_event(step: int, num_layers: int = 1, num_experts: int = 2, **fields: object) -> Event:
    experts = [{"id": id_, "share": 1 / num_experts, "hosts": [0], "age": step} for id_ in range(num_experts)]
    layers = [{"layer": index, "experts": experts, **fields} for index in range(num_layers)]
    return {"event": "expert_graph", "step": step, "epoch": 0, "layers": layers}


def test_the_area_of_a_node_is_its_use() -> None:
    event = graph_event(10, num_experts=3)
    for expert, share in zip(event["layers"][0]["experts"], (0.5, 0.25, 0.25), strict=True):
        expert["share"] = share
    busy, *others = layer_view(views_of([event])[0]).nodes
    assert [(busy.radius / node.radius) ** 2 for node in others] == pytest.approx([2.0, 2.0])


def test_the_ring_is_the_part_of_the_training_that_an_expert_has_lived() -> None:
    nodes = {node.expert.id: node for node in layer_view(views_of(evolving_events())[0]).nodes}
    assert nodes[0].ring == 1.0
    assert nodes[4].ring == pytest.approx(10 / 30), "born at step 20, seen at step 30"


def test_texts_have_the_figures() -> None:
    layer = layer_view(views_of(evolving_events(EVOLVING_HOSTS))[-1])
    text = next(node.text for node in layer.nodes if node.expert.id == 2)
    expert = next(node.expert for node in layer.nodes if node.expert.id == 2)
    assert text.startswith(f"expert 2: {expert.share:.1%} of the choices ({3 * expert.share:.2f} times")
    assert text.endswith("size 64, hosts 0, 1, 120 steps old")
    texts = {edge.kind: edge.text for edge in layer_view(views_of(evolving_events())[0]).edges}
    assert "chosen together by" in texts["coactivation"]
    assert "similarity 0." in texts["similarity"]
    assert texts["parentage"] == "expert 4 descends from 1"


def test_removed_experts_are_ghosts_of_the_view_before() -> None:
    after_merge = layer_view(views_of(evolving_events())[1])
    assert [ghost.id for ghost in after_merge.ghosts] == [0, 3]
    descents = sorted(edge.text for edge in after_merge.edges if edge.kind == "parentage")
    assert descents == [
        "expert 4 descends from 1",
        "expert 5 descends from 0",
        "expert 5 descends from 3",
    ]
    assert layer_view(views_of(evolving_events())[2]).ghosts == ()


def test_the_view_before_is_the_one_that_is_shown_before() -> None:
    """Pictures of epochs show the parents of an expert that a sleep in the epoch merged."""
    graphs = expert_graphs(decoded(evolving_events()))
    epochs = [graph for graph in graphs if graph.step in (30, 60, 90)]
    views = views_of(evolving_events(), epochs)
    assert [ghost.id for ghost in layer_view(views[1]).ghosts] == [0, 3]
    all_views = {view.step: view for view in views_of(evolving_events())}
    for view in views:
        places = {node.expert.id: node.place for node in layer_view(view).nodes}
        assert places == {node.expert.id: node.place for node in layer_view(all_views[view.step]).nodes}


def test_edges_of_different_kinds_do_not_cover_each_other() -> None:
    pairs = [[0, 1, 0.5]]
    layer = layer_view(views_of([graph_event(10, coactivation=pairs, similarity=pairs)])[0])
    bends = [edge.bend for edge in layer.edges]
    assert math.dist(*bends) > 0.1
    assert [edge.width for edge in layer.edges] == [pytest.approx(0.6)] * 2, (
        "half the strength, and the least"
    )


def test_the_layers_with_the_most_changes_are_shown() -> None:
    events = [graph_event(10, num_layers=9), expert_event(10, "born", [2], layer=7)]
    (view,) = views_of(events)
    assert [layer.layer for layer in view.layers if layer is not None] == [0, 1, 2, 3, 4, 7]
    assert (len(view.layers), view.num_layers) == (MAX_LAYERS, 9)


def test_a_layer_that_a_graph_does_not_name_is_empty() -> None:
    first, second = views_of([graph_event(10, num_layers=1), graph_event(20, num_layers=2)])
    assert first.layers[1] is None
    assert layer_view(second, 1).layer == 1


def test_of_many_edges_the_strongest_are_drawn() -> None:
    pairs = [[a, b, (a * 40 + b) / 1600] for a in range(40) for b in range(a + 1, 40)]
    layer = layer_view(views_of([graph_event(10, num_experts=40, similarity=pairs)])[0])
    assert len(layer.edges) == MAX_EDGES
    weakest = sorted(value for _, _, value in pairs)[-MAX_EDGES]
    texts = [edge.text for edge in layer.edges]
    assert min(float(text.rpartition(" ")[2]) for text in texts) == pytest.approx(weakest, abs=0.01)
    assert max(edge.width for edge in layer.edges) < 0.5, "thinner among many experts"


def test_a_graph_before_the_first_step_has_full_rings() -> None:
    assert {node.ring for node in layer_view(views_of([graph_event(0)])[0]).nodes} == {1.0}


def test_items_are_spread_evenly() -> None:
    assert spread(list(range(5)), 9) == [0, 1, 2, 3, 4]
    assert spread(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert spread(list(range(7)), 2) == [0, 6]
