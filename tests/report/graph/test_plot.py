"""Tests of the drawings of the graph of experts."""

from __future__ import annotations

from collections import Counter

from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.runs.records import decoded
from orchestrator.record.experts.expert_changes import expert_changes
from orchestrator.record.experts.expert_graph import expert_graphs
from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Disc, Group, Path, Plot, Text, series_color
from orchestrator.report.graph.plot import graph_picture
from orchestrator.report.graph.view import GraphView, graph_views


def views() -> list[GraphView]:
    events = evolving_events(EVOLVING_HOSTS)
    graphs = expert_graphs(decoded(events))
    return graph_views(graphs, expert_changes(decoded(events)), graphs)


def first_plot(view: GraphView) -> Plot:
    plot = graph_picture(view, "run").plots[0]
    assert plot is not None
    return plot


def parts(plot: Plot, kind: type) -> list:
    groups = [mark for mark in plot.marks if isinstance(mark, Group)]
    return [part for group in groups for part in group.marks if isinstance(part, kind)]


def test_the_title_names_run_epoch_step_and_layers() -> None:
    picture = graph_picture(views()[2], "a $run$")
    assert picture.title == "Experts of a $run$, epoch 2, step 60"
    titles = [(plot.title, plot.unit) for plot in picture.plots if plot is not None]
    assert titles == [("Layer 0  blocks.0.ffn", "4 experts"), ("Layer 1  blocks.1.ffn", "5 experts")]
    assert png(picture).startswith(b"\x89PNG")


def test_nodes_have_the_colours_of_their_hosts() -> None:
    plot = first_plot(views()[-1])
    colors = Counter(disc.color for disc in parts(plot, Disc))
    assert colors[series_color(0)] == 2, "expert 5, and a copy of expert 2"
    assert colors[series_color(1)] == 1, "the other copy"
    assert colors[series_color(2)] == 1, "expert 4 was moved"
    assert sorted(text.text for text in parts(plot, Text)) == ["2", "4", "5"]


def test_edges_differ_by_kind() -> None:
    view = views()[0]
    layer = view.layers[0]
    assert layer is not None
    counts = Counter(edge.kind for edge in layer.edges)
    looks = Counter((path.stroke, path.dash) for path in parts(first_plot(view), Path))
    assert sorted(looks.values()) == sorted(counts.values())
    labels = [key.text for key in graph_picture(view, "run").keys]
    assert labels[:3] == ["host 0", "host 1", "host 2"]
    assert labels[3:] == ["chosen together", "alike", "descends from", "ring: time lived", "area: use"]


def test_a_part_of_many_layers_is_noted() -> None:
    view = views()[0]
    many = GraphView(view.step, view.epoch, view.layers, num_layers=24)
    assert "(2 of 24 layers)" in graph_picture(many, "run").title


def test_a_missing_layer_leaves_its_place_empty() -> None:
    view = views()[0]
    partial = GraphView(view.step, view.epoch, (view.layers[0], None), num_layers=2)
    assert [plot is not None for plot in graph_picture(partial, "run").plots] == [True, False]
