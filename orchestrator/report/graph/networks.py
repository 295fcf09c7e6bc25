"""The graph of the experts as data: a networkx graph, and plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.record.expert_changes import ExpertChange
from orchestrator.record.expert_graph import ExpertGraph, GraphLayer

if TYPE_CHECKING:
    from networkx import MultiGraph


def to_networkx(graph: ExpertGraph) -> MultiGraph:
    """Return a graph whose nodes are (layer, expert id), with the expert's figures as attributes.

    The key of an edge is its kind: coactivation and similarity have a ``value``, parentage the
    ``parent``."""
    from networkx import MultiGraph

    network = MultiGraph(
        step=graph.step, epoch=graph.epoch, layers={each.layer: each.name for each in graph.layers}
    )
    for layer in graph.layers:
        _add_layer(network, layer)
    return network


def _add_layer(network: MultiGraph, layer: GraphLayer) -> None:
    index = layer.layer
    for expert in layer.experts:
        network.add_node((index, expert.id), layer=index, **asdict(expert))
    for kind, pairs in (("coactivation", layer.coactivation), ("similarity", layer.similarity)):
        for pair in pairs:
            network.add_edge((index, pair.first), (index, pair.second), key=kind, kind=kind, value=pair.value)
    for expert in layer.experts:
        for parent in set(expert.parents) & set(layer.ids):
            nodes = ((index, parent), (index, expert.id))
            network.add_edge(*nodes, key="parentage", kind="parentage", parent=parent)


def to_json(graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange]) -> dict[str, Any]:
    """Return all graphs and changes of a run as plain values."""
    return {"graphs": [asdict(graph) for graph in graphs], "changes": [asdict(change) for change in changes]}
