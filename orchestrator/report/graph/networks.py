"""The graph of the experts as data: a networkx graph, and plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.record.events.kinds import ExpertChange, ExpertGraph, GraphLayer

if TYPE_CHECKING:
    from networkx import MultiGraph


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
