"""The graphs of a run's experts, as ``expert_graph`` events record them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import Event
from orchestrator.record.events.sessions import by_step


def expert_graphs(events: Iterable[Event]) -> list[kinds.ExpertGraph]:
    """Return the graphs of a run in order of steps, without those that a restart discarded."""
    relevant = [
        event
        for event in events
        if isinstance(event, kinds.ExpertGraph | kinds.Recovery | kinds.Start | kinds.Failure)
    ]
    return list(map(checked_graph, by_step(effective_events(relevant), kinds.ExpertGraph)))


def checked_graph(graph: kinds.ExpertGraph) -> kinds.ExpertGraph:
    """Return a graph without empty layers, experts that come twice and pairs of unknown ones."""
    return replace(graph, layers=tuple(_checked_layer(layer) for layer in graph.layers if layer.experts))


def _checked_layer(layer: kinds.GraphLayer) -> kinds.GraphLayer:
    by_id = {expert.id: expert for expert in layer.experts}

    def known(pairs: Sequence[kinds.GraphPair]) -> tuple[kinds.GraphPair, ...]:
        return tuple(
            pair for pair in pairs if {pair.first, pair.second} <= by_id.keys() and pair.first != pair.second
        )

    return replace(
        layer,
        experts=tuple(by_id.values()),
        coactivation=known(layer.coactivation),
        similarity=known(layer.similarity),
    )


def recorded_sizes(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Return the sizes that the graphs of a run name, by layer and expert id."""
    layers = [layer for event in events if isinstance(event, kinds.ExpertGraph) for layer in event.layers]
    return {
        (layer.layer, expert.id): expert.size for layer in layers for expert in layer.experts if expert.size
    }


def graph_of_epochs(graphs: Iterable[kinds.ExpertGraph]) -> dict[int, kinds.ExpertGraph]:
    """Return the last graph of each epoch."""
    return {graph.shown_epoch: graph for graph in graphs}
