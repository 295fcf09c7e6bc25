"""Tests of the graph of experts as data."""

from __future__ import annotations

import json

from harness.fakes.fake_evolution import EVOLVING_HOSTS, FINAL_IDS, evolving_events
from harness.runs.records import decoded
from orchestrator.record.experts.expert_changes import expert_changes, expert_graphs
from orchestrator.report.run.figures.graph_files import to_json, to_networkx

EVENTS = evolving_events(EVOLVING_HOSTS)
GRAPHS = expert_graphs(decoded(EVENTS))


def test_nodes_are_experts_with_their_figures() -> None:
    network = to_networkx(GRAPHS[-1])
    expected = {(layer, expert) for layer, ids in enumerate(FINAL_IDS) for expert in ids}
    assert set(network.nodes) == expected
    assert network.nodes[0, 2]["hosts"] == (0, 1)
    assert network.nodes[0, 4]["parents"] == (1,)
    assert network.nodes[0, 4]["age"] == 100
    assert network.graph == {"step": 120, "epoch": 4, "layers": {0: "blocks.0.ffn", 1: "blocks.1.ffn"}}


def test_edges_have_kinds_and_values() -> None:
    graph = GRAPHS[0]
    network = to_networkx(graph)
    for layer in graph.layers:
        for kind, pairs in (("coactivation", layer.coactivation), ("similarity", layer.similarity)):
            for pair in pairs:
                nodes = ((layer.layer, pair.first), (layer.layer, pair.second))
                assert network.edges[(*nodes, kind)]["value"] == pair.value
    assert network.edges[(0, 1), (0, 4), "parentage"]["parent"] == 1
    num_pairs = sum(len(layer.coactivation) + len(layer.similarity) for layer in graph.layers)
    assert network.number_of_edges() == num_pairs + 1


def test_parents_that_are_gone_are_no_nodes() -> None:
    network = to_networkx(GRAPHS[1])
    assert (0, 0) not in network
    assert network.nodes[0, 5]["parents"] == (0, 3)


def test_the_json_has_graphs_and_changes() -> None:
    data = json.loads(json.dumps(to_json(GRAPHS, expert_changes(decoded(EVENTS)))))
    assert [graph["step"] for graph in data["graphs"]] == [graph.step for graph in GRAPHS]
    assert data["graphs"][0]["layers"][0]["experts"][4]["parents"] == [1]
    assert [change["change"] for change in data["changes"]][:3] == ["born", "warmed", "merged"]
