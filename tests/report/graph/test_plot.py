"""Tests of the pictures of the graph of experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.colors import to_hex

from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.runs.records import decoded
from orchestrator.record.experts.expert_changes import expert_changes
from orchestrator.record.experts.expert_graph import expert_graphs
from orchestrator.report.draw.mpl import COLORS, png
from orchestrator.report.graph.plot import graph_figure
from orchestrator.report.graph.view import GraphView, graph_views


def views() -> list[GraphView]:
    events = evolving_events(EVOLVING_HOSTS)
    graphs = expert_graphs(decoded(events))
    return graph_views(graphs, expert_changes(decoded(events)), graphs)


def collections(axes: Any, kind: type) -> list[Any]:
    return [collection for collection in axes.collections if isinstance(collection, kind)]


def test_the_title_names_run_epoch_step_and_layers() -> None:
    figure = graph_figure(views()[2], "a $run$")
    assert figure.get_suptitle() == r"Experts of a \$run\$, epoch 2, step 60"
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Layer 0  blocks.0.ffn  (4 experts)", "Layer 1  blocks.1.ffn  (5 experts)"]
    assert png(figure).startswith(b"\x89PNG")


def test_nodes_have_the_colours_of_their_hosts() -> None:
    axes = graph_figure(views()[-1], "run").axes[0]
    (shapes,) = collections(axes, PatchCollection)
    colors = [to_hex(color) for color in shapes.get_facecolor()]
    assert colors.count(COLORS[0]) == 2, "expert 5, and a copy of expert 2"
    assert colors.count(COLORS[1]) == 1, "the other copy"
    assert colors.count(COLORS[2]) == 1, "expert 4 was moved"
    assert sorted(text.get_text() for text in axes.texts) == ["2", "4", "5"]


def test_edges_differ_by_kind() -> None:
    view = views()[0]
    axes = graph_figure(view, "run").axes[0]
    edges = collections(axes, PathCollection)
    layer = view.layers[0]
    assert layer is not None
    counts = Counter(edge.kind for edge in layer.edges)
    assert [len(each.get_paths()) for each in edges] == [
        counts["coactivation"],
        counts["similarity"],
        counts["parentage"],
    ]
    assert len({str(each.get_linestyle()) for each in edges}) == 3
    legend = graph_figure(views()[0], "run").legends[0]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:3] == ["host 0", "host 1", "host 2"]
    assert labels[3:] == ["chosen together", "alike", "descends from", "ring: time lived", "area: use"]


def test_a_part_of_many_layers_is_noted() -> None:
    view = views()[0]
    many = GraphView(view.step, view.epoch, view.layers, num_layers=24)
    assert "(2 of 24 layers)" in graph_figure(many, "run").get_suptitle()


def test_a_missing_layer_leaves_its_place_empty() -> None:
    view = views()[0]
    partial = GraphView(view.step, view.epoch, (view.layers[0], None), num_layers=2)
    assert [axes.get_visible() for axes in graph_figure(partial, "run").axes] == [True, False]
