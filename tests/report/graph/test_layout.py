"""Tests of the places of experts: they stay, they keep a distance, and newborns are near their parents."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from harness.fakes.fake_evolution import evolving_events
from harness.runs.records import decoded
from orchestrator.record.events.kinds import GraphExpert, GraphLayer
from orchestrator.record.experts.expert_changes import expert_graphs
from orchestrator.report.graph.layout import MAX_RADIUS, expert_places, spacing


def layer_of(*ids: int) -> GraphLayer:
    experts = [GraphExpert(id_, 64.0, 0.1, (0,), 10, (), False) for id_ in ids]
    return GraphLayer(0, "ffn", tuple(experts), (), ())


def nearest(places: dict[int, tuple[float, float]], expert: int, others: tuple[int, ...]) -> int:
    return min(others, key=lambda other: math.dist(places[expert], places[other]))


def test_experts_stay_where_they_were() -> None:
    """More graphs with as many experts at a time move nobody."""
    graphs = [layer_of(0, 1, 2, 3), layer_of(0, 1, 2, 3, 4), layer_of(2, 4, 5), layer_of(2, 4, 5, 6)]
    parents = {4: (1,), 5: (0, 3), 6: (2,)}
    before = expert_places(graphs[:2], parents)
    after = expert_places(graphs, parents)
    assert {id_: after[id_] for id_ in before} == before
    assert expert_places(graphs, parents) == after


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12, 16, 64, 200])
def test_experts_keep_a_distance(count: int) -> None:
    layers = [layer_of(*range(count))]
    places = expert_places(layers, {})
    assert len(places) == count
    closest = min((math.dist(a, b) for a, b in combinations(places.values(), 2)), default=1.0)
    assert closest >= 0.85 * spacing(layers)
    assert max(math.hypot(*place) for place in places.values()) <= MAX_RADIUS


def test_newborns_keep_the_distance_too() -> None:
    """Random births and deaths, never more than 12 experts."""
    draw = random.Random(3)
    alive = [0, 1, 2, 3]
    parents: dict[int, tuple[int, ...]] = {}
    layers = [layer_of(*alive)]
    for newborn in range(4, 40):
        parents[newborn] = (draw.choice(alive),)
        alive.append(newborn)
        if len(alive) > 12 or draw.random() < 0.3:
            alive.remove(draw.choice(alive))
        layers.append(layer_of(*alive))
    places = expert_places(layers, parents)
    for layer in layers:
        pairs = combinations([places[id_] for id_ in layer.ids], 2)
        assert min(math.dist(a, b) for a, b in pairs) >= 0.75 * spacing(layers)


def test_a_newborn_is_near_its_parent() -> None:
    for parent in range(6):
        places = expert_places([layer_of(*range(6)), layer_of(*range(7))], {6: (parent,)})
        assert nearest(places, 6, tuple(range(6))) == parent


def test_a_newborn_of_the_first_graph_is_near_its_parent() -> None:
    places = expert_places([layer_of(0, 1, 2, 3, 4)], {4: (2,)})
    assert nearest(places, 4, (0, 1, 2, 3)) == 2


def test_a_merged_expert_is_between_its_parents() -> None:
    places = expert_places([layer_of(0, 1, 2, 3), layer_of(2, 3, 4)], {4: (0, 1)})
    middle = tuple((a + b) / 2 for a, b in zip(places[0], places[1], strict=True))
    assert places[4] == pytest.approx(middle)


def test_parents_that_no_graph_shows_lead_to_their_own() -> None:
    """Expert 6 comes from 5, which lived between two graphs and came from 1."""
    places = expert_places([layer_of(0, 1, 2, 3), layer_of(0, 1, 2, 3, 6)], {6: (5,), 5: (1,)})
    assert nearest(places, 6, (0, 1, 2, 3)) == 1


def test_a_circle_of_parents_is_harmless() -> None:
    assert len(expert_places([layer_of(0, 1)], {0: (1,), 1: (0,)})) == 2
    assert len(expert_places([layer_of(0), layer_of(0, 3)], {3: (4,), 4: (3,)})) == 2


def test_a_recorded_run_has_a_place_for_each_expert() -> None:
    graphs = expert_graphs(decoded(evolving_events()))
    layers = [layer for graph in graphs if (layer := graph.layer(0)) is not None]
    assert set(expert_places(layers, {4: (1,), 5: (0, 3)})) == {0, 1, 2, 3, 4, 5}
