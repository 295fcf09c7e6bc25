"""Tests of the drawings of the graph of experts."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import decoded
from orchestrator.record.events.kinds import ExpertGraph
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.experts.expert_changes import expert_changes, expert_graphs
from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Disc, Group, Path, Point, Text, series_color
from orchestrator.report.graph.drawing import (
    MAX_EDGE_WIDTH,
    MAX_EDGES,
    MAX_LAYERS,
    GraphView,
    LayerView,
    graph_picture,
    graph_views,
    spread,
)


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


def edges(view: LayerView) -> list[Path]:
    return [mark for group in view.marks for mark in group.marks if isinstance(mark, Path)]


def texts(view: LayerView, start: str = "") -> list[str]:
    return [group.text for group in view.marks if group.text.startswith(start)]


def discs(view: LayerView) -> dict[int, list[Disc]]:
    """Return the discs of each expert that the graph has."""
    found = {}
    for expert in view.layer.experts:
        group = node(view, expert.id)
        found[expert.id] = [mark for mark in group.marks if isinstance(mark, Disc)]
    return found


def node(view: LayerView, expert: int) -> Group:
    return next(group for group in view.marks if group.text.startswith(f"expert {expert}: "))


def centers(view: LayerView) -> dict[int, Point]:
    return {expert: parts[0].center for expert, parts in discs(view).items()}


def lived(view: LayerView) -> dict[int, float]:
    """Return the part of the ring of each expert that is filled."""
    return {expert: parts[-1].end for expert, parts in discs(view).items()}


def gone(view: LayerView) -> list[str]:
    return [text for text in texts(view) if text.endswith("is gone since the graph before")]


def test_the_area_of_a_node_is_its_use() -> None:
    event = graph_event(10, num_experts=3)
    for expert, share in zip(event["layers"][0]["experts"], (0.5, 0.25, 0.25), strict=True):
        expert["share"] = share
    busy, *others = (parts[0].radius for parts in discs(layer_view(views_of([event])[0])).values())
    assert [(busy / radius) ** 2 for radius in others] == pytest.approx([2.0, 2.0])


def test_the_ring_is_the_part_of_the_training_that_an_expert_has_lived() -> None:
    rings = lived(layer_view(views_of(evolving_events())[0]))
    assert rings[0] == 1.0
    assert rings[4] == pytest.approx(10 / 30), "born at step 20, seen at step 30"


def test_a_graph_before_the_first_step_has_full_rings() -> None:
    assert set(lived(layer_view(views_of([graph_event(0)])[0])).values()) == {1.0}


def test_texts_have_the_figures() -> None:
    view = layer_view(views_of(evolving_events(EVOLVING_HOSTS))[-1])
    expert = next(expert for expert in view.layer.experts if expert.id == 2)
    text = node(view, 2).text
    assert text.startswith(f"expert 2: {expert.share:.1%} of the choices ({3 * expert.share:.2f} times")
    assert text.endswith("size 64, hosts 0, 1, 120 steps old")
    first = layer_view(views_of(evolving_events())[0])
    assert any("chosen together by" in text for text in texts(first, "experts"))
    assert any("similarity 0." in text for text in texts(first, "experts"))
    assert "expert 4 descends from 1" in texts(first)


def test_removed_experts_are_shown_in_the_next_graph() -> None:
    views = views_of(evolving_events())
    after_merge = layer_view(views[1])
    assert gone(after_merge) == [f"expert {id_} is gone since the graph before" for id_ in (0, 3)]
    descents = [text for text in texts(after_merge) if "descends" in text]
    assert sorted(descents) == [
        "expert 4 descends from 1",
        "expert 5 descends from 0",
        "expert 5 descends from 3",
    ]
    assert gone(layer_view(views[2])) == []


def test_the_graph_before_is_the_one_that_is_shown_before() -> None:
    """Pictures of epochs show the parents of an expert that a sleep in the epoch merged."""
    graphs = expert_graphs(decoded(evolving_events()))
    epochs = [graph for graph in graphs if graph.step in (30, 60, 90)]
    views = views_of(evolving_events(), epochs)
    assert len(gone(layer_view(views[1]))) == 2
    all_views = {view.step: view for view in views_of(evolving_events())}
    for view in views:
        assert centers(layer_view(view)) == centers(layer_view(all_views[view.step]))


def test_edges_of_different_kinds_do_not_cover_each_other() -> None:
    pairs = [[0, 1, 0.5]]
    first, second = edges(layer_view(views_of([graph_event(10, coactivation=pairs, similarity=pairs)])[0]))
    assert math.dist(first.steps[1][1][0], second.steps[1][1][0]) > 0.05
    assert [edge.width for edge in (first, second)] == [pytest.approx(0.6 * MAX_EDGE_WIDTH)] * 2, (
        "half the strength, and the least"
    )


def test_the_layers_with_the_most_changes_are_shown() -> None:
    events = [graph_event(10, num_layers=9), expert_event(10, "born", [2], layer=7)]
    (view,) = views_of(events)
    assert [layer.layer.layer for layer in view.known_layers] == [0, 1, 2, 3, 4, 7]
    assert (len(view.layers), view.num_layers) == (MAX_LAYERS, 9)
    assert "(6 of 9 layers)" in graph_picture(view, "run").title


def test_a_layer_that_a_graph_does_not_name_leaves_its_place_empty() -> None:
    first, second = views_of([graph_event(10, num_layers=1), graph_event(20, num_layers=2)])
    assert first.layers[1] is None
    assert layer_view(second, 1).layer.layer == 1
    assert [plot is not None for plot in graph_picture(first, "run").plots] == [True, False]


def test_of_many_edges_the_strongest_are_drawn() -> None:
    pairs = [[a, b, (a * 40 + b) / 1600] for a in range(40) for b in range(a + 1, 40)]
    view = layer_view(views_of([graph_event(10, num_experts=40, similarity=pairs)])[0])
    assert len(edges(view)) == MAX_EDGES
    weakest = sorted(value for _, _, value in pairs)[-MAX_EDGES]
    values = [float(text.rpartition(" ")[2]) for text in texts(view, "experts")]
    assert min(values) == pytest.approx(weakest, abs=0.01)
    assert max(edge.width for edge in edges(view)) < 0.5 * MAX_EDGE_WIDTH, "thinner among many experts"


def test_items_are_spread_evenly() -> None:
    assert spread(list(range(5)), 9) == [0, 1, 2, 3, 4]
    assert spread(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert spread(list(range(7)), 2) == [0, 6]


def test_the_title_names_run_epoch_step_and_layers() -> None:
    picture = graph_picture(views_of(evolving_events(EVOLVING_HOSTS))[2], "a $run$")
    assert picture.title == "Experts of a $run$, epoch 2, step 60"
    titles = [(plot.title, plot.unit) for plot in picture.plots if plot is not None]
    assert titles == [("Layer 0  blocks.0.ffn", "4 experts"), ("Layer 1  blocks.1.ffn", "5 experts")]
    assert png(picture).startswith(b"\x89PNG")


def test_nodes_have_the_colours_of_their_hosts() -> None:
    view = layer_view(views_of(evolving_events(EVOLVING_HOSTS))[-1])
    colors = Counter(disc.color for parts in discs(view).values() for disc in parts)
    assert colors[series_color(0)] == 2, "expert 5, and a copy of expert 2"
    assert colors[series_color(1)] == 1, "the other copy"
    assert colors[series_color(2)] == 1, "expert 4 was moved"
    labels = [mark.text for group in view.marks for mark in group.marks if isinstance(mark, Text)]
    assert sorted(labels) == ["2", "4", "5"]


def test_edges_differ_by_kind() -> None:
    view = views_of(evolving_events(EVOLVING_HOSTS))[0]
    layer = layer_view(view).layer
    num_descents = sum(len(expert.parents) for expert in layer.experts)
    looks = Counter((path.stroke, path.dash) for path in edges(layer_view(view)))
    assert sorted(looks.values()) == sorted((len(layer.coactivation), len(layer.similarity), num_descents))
    labels = [key.text for key in graph_picture(view, "run").keys]
    assert labels[:3] == ["host 0", "host 1", "host 2"]
    assert labels[3:] == ["chosen together", "alike", "descends from", "ring: time lived", "area: use"]
