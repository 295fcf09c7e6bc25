"""Files and objects of the graph of a run's experts: pictures, JSON, networkx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UserError
from orchestrator.record.events.kinds import ExpertChange, ExpertGraph, GraphLayer
from orchestrator.record.experts.expert_changes import graph_of_epochs
from orchestrator.record.files.event_log import encode_event
from orchestrator.report.draw.image import png
from orchestrator.report.graph.drawing import graph_picture, graph_views, spread
from orchestrator.report.run.figures.read import RunRecord, read_run_record
from orchestrator.storage.local_files import write_whole

if TYPE_CHECKING:
    from networkx import MultiGraph

GRAPH_JSON = "expert_graph.json"
MAX_PICTURES = 40
"""Of more epochs as many are drawn, evenly spaced, with the first and the last."""


def write_graph_files(record: RunRecord, folder: Path, with_pictures: bool = True) -> list[Path]:
    """Write the graph of each epoch as a picture, and all graphs as JSON; nothing without graphs."""
    graphs = record.expert_graphs
    if not graphs:
        return []
    pictures = _draw_epochs(record, folder) if with_pictures else []
    data = to_json(graphs, record.expert_changes)
    return [*pictures, write_whole(folder / GRAPH_JSON, encode_event(data) + "\n")]


def _draw_epochs(record: RunRecord, folder: Path) -> list[Path]:
    ends_of_epochs = list(graph_of_epochs(record.expert_graphs).values())
    views = graph_views(record.expert_graphs, record.expert_changes, spread(ends_of_epochs, MAX_PICTURES))
    return [
        write_whole(folder / f"knowledge_graph_epoch_{view.epoch}.png", png(graph_picture(view, record.name)))
        for view in views
    ]


def read_expert_graph(folder: str | Path, epoch: int | None = None) -> MultiGraph:
    """Return the graph of a run's experts at the end of an epoch, as networkx has it::

        graph = orchestrator.read_expert_graph("results/digits")
        busiest = max(graph.nodes, key=lambda node: graph.nodes[node]["share"])

    Epochs are counted from 1, as in the names of the pictures; without one it is the last graph of the run.
    A node is (layer, expert id), with the attributes ``share``, ``size``, ``hosts``, ``age``, ``parents``,
    ``warming``. The key of an edge is its kind: ``coactivation`` and ``similarity`` have a ``value``,
    ``parentage`` the ``parent``.
    """
    graphs = read_run_record(Path(folder)).expert_graphs
    if not graphs:
        raise UserError(
            f"the run {folder} recorded no graph of its experts: a run writes them while its experts may "
            "change. Train with --evolution cautious or bold"
        )
    of_epoch = graph_of_epochs(graphs)
    if epoch is not None and epoch not in of_epoch:
        known = ", ".join(map(str, of_epoch))
        raise UserError(f"the run {folder} has no graph of epoch {epoch}; it has {known}")
    return to_networkx(graphs[-1] if epoch is None else of_epoch[epoch])


def to_networkx(graph: ExpertGraph) -> MultiGraph:
    """Return a graph whose nodes are (layer, expert id), with the expert's figures as attributes.

    The key of an edge is its kind: coactivation and similarity have a ``value``, parentage the
    ``parent``."""
    from networkx import MultiGraph

    network = MultiGraph(
        step=graph.step, epoch=graph.shown_epoch, layers={each.layer: each.name for each in graph.layers}
    )
    for layer in graph.layers:
        _add_layer(network, layer)
    return network


def _add_layer(network: MultiGraph, layer: GraphLayer) -> None:
    index = layer.layer
    for expert in layer.experts:
        network.add_node((index, expert.id), layer=index, **vars(expert))
    for kind, pairs in (("coactivation", layer.coactivation), ("similarity", layer.similarity)):
        for pair in pairs:
            network.add_edge((index, pair.first), (index, pair.second), key=kind, kind=kind, value=pair.value)
    for expert in layer.experts:
        for parent in set(expert.parents) & set(layer.ids):
            nodes = ((index, parent), (index, expert.id))
            network.add_edge(*nodes, key="parentage", kind="parentage", parent=parent)


def to_json(graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange]) -> dict[str, Any]:
    """Return all graphs and changes of a run as plain values, with the pairs as in the events."""
    return {
        "graphs": [
            {"step": graph.step, "epoch": graph.shown_epoch, "layers": list(map(_layer_json, graph.layers))}
            for graph in graphs
        ],
        "changes": [vars(change) for change in changes],
    }


def _layer_json(layer: GraphLayer) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "name": layer.name,
        "experts": [vars(expert) for expert in layer.experts],
        "coactivation": layer.coactivation,
        "similarity": layer.similarity,
    }
