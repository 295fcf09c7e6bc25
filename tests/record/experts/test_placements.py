"""Tests of the hosts of the experts over a run, of their work and times, against figures made by hand."""

import math
from typing import Any

import pytest

from harness.fakes.fake_placements import LAYER, expert_event, host, layer, load, placement_event
from harness.runs.records import decoded, made
from orchestrator.record.experts.host_balance import SettledLoads, imbalance, settled_loads, token_counts
from orchestrator.record.experts.placements import (
    RecordedPlacement,
    placement_at,
    placement_spans,
    recorded_placement,
)


def parsed(*layers: Any, **fields: Any) -> RecordedPlacement:
    placement = recorded_placement(made(placement_event(*layers, **fields)))
    assert placement is not None
    return placement


def rows(*layers: list[float]) -> list[dict[int, float]]:
    return [dict(enumerate(layer)) for layer in layers]


def last_placement(*events: Any) -> RecordedPlacement:
    placement = placement_spans(decoded(events))[-1][1]
    assert placement is not None
    return placement


def test_work_is_rows_times_size_and_time_is_work_over_speed() -> None:
    placement = parsed(LAYER)
    assert placement.work(rows([6, 3, 2])) == [[60, 60 + 60]]
    assert placement.times(rows([6, 3, 2])) == [[60, 60]]
    assert placement.layer_waits([[60, 60]]) == [(60, 60)]


def test_the_mean_time_is_all_work_over_all_speed() -> None:
    """The time if hosts finish together: (120 + 2 × 60) / 3, not the mean of 120 and 60."""
    placement = parsed(LAYER)
    times = placement.times(rows([12, 3, 2]))
    assert times == [[120, 60]]
    assert placement.mean(times[0]) == 80
    assert placement.relative_times(times[0]) == [1.5, 0.75]
    assert imbalance(placement.layer_waits(times)) == 1.5


def test_hosts_wait_in_every_layer() -> None:
    """Balanced totals are not enough: each layer has another slowest host."""
    placement = parsed(layer([0, 1], [1, 1]), layer([0, 1], [1, 1]), hosts=[host(0), host(1)])
    times = placement.times(rows([30, 10], [10, 30]))
    assert times == [[30, 10], [10, 30]]
    assert imbalance(placement.layer_waits(times)) == pytest.approx(60 / 40)
    assert placement.relative_times([sum(each) for each in zip(*times, strict=True)]) == [1.0, 1.0]


def test_a_host_without_experts_is_idle() -> None:
    placement = parsed(layer([0, 0], [8, 8]), hosts=[host(0), host(1), host(2)])
    assert [placement.layers[0].held_by(index) for index in range(3)] == [[0, 1], [], []]
    assert imbalance(placement.layer_waits(placement.times(rows([5, 5])))) == 3.0


def test_hosts_are_found_by_rank() -> None:
    placement = parsed(layer([5, 3], [1, 1]), hosts=[host(3), host(5)])
    assert placement.layers[0].hosts == ((1,), (0,))


def test_each_step_counts_under_the_placement_it_ran_under() -> None:
    moved = placement_event(layer([0, 0, 1], [10, 20, 30]), step=10, hosts=[host(0), host(1)])
    spans = placement_spans(decoded([placement_event(LAYER), moved]))
    assert placement_at(spans, 10) == recorded_placement(made(placement_event(LAYER)))
    assert placement_at(spans, 11) == recorded_placement(made(moved))
    assert placement_at(spans, 0) == recorded_placement(made(placement_event(LAYER))), (
        "the first placement holds for earlier steps"
    )
    assert placement_at([], 1) is None
    early, late = load(10, [6, 3, 2]), load(20, [6, 3, 2])
    last = recorded_placement(made(moved))
    assert last is not None
    settled = settled_loads(decoded([placement_event(LAYER), moved]), decoded([early, late]))
    assert settled == SettledLoads(last, [(last, made(late))])


def test_a_restart_removes_the_placements_of_later_steps() -> None:
    first, moved, again = (
        placement_event(LAYER),
        placement_event(LAYER, step=40),
        placement_event(LAYER, step=35, method="file"),
    )
    assert [
        (step, placement and placement.method)
        for step, placement in placement_spans(decoded([first, moved, again]))
    ] == [
        (0, "lpt"),
        (35, "file"),
    ]
    assert [step for step, _ in placement_spans(decoded([first, placement_event(LAYER, step=0)]))] == [0]


def test_a_run_resumed_without_expert_parallelism_has_no_placement() -> None:
    events = [
        placement_event(LAYER),
        load(10, [6, 3, 2]),
        {"event": "start", "step": 10, "strategy": "data_parallel"},
        load(20, [12, 3, 2]),
    ]
    spans = placement_spans(decoded(events))
    assert placement_at(spans, 20) is None
    assert (
        settled_loads(decoded(events), decoded([event for event in events if event["event"] == "load"]))
        is None
    )
    same = [
        {"event": "start", "step": 0, "strategy": "expert_parallel"},
        placement_event(LAYER),
        {"event": "start", "step": 10},
    ]
    assert placement_at(placement_spans(decoded(same)), 20) is not None


def test_the_prediction_is_seconds_else_work_else_sizes() -> None:
    assert parsed(layer([0, 1], [1, 1], seconds=[3.0, 1.0])).layers[0].predicted_times == (3.0, 1.0)
    assert parsed(layer([0, 1], [1, 1], costs=[3.0, 1.0])).layers[0].predicted_times == (3.0, 0.5)
    assert parsed(layer([0, 1], [4, 6])).layers[0].predicted_times == (4.0, 3.0)
    assert parsed(layer([0, 1], [])).layers[0].predicted_times == (1.0, 0.5)


def test_a_row_costs_the_size_of_its_expert() -> None:
    assert parsed(layer([0, 1], [4, 6], costs=[0.9, 0.1])).layers[0].row_costs == (4, 6)
    assert parsed(layer([0, 1], [4], costs=[0.9, 0.1])).layers[0].row_costs == (0.9, 0.1)
    assert parsed(layer([0, 1], [4, None], costs=["x", 1])).layers[0].row_costs == (1.0, 1.0)


def test_speeds_count_as_equal_unless_all_are_known() -> None:
    for speed in (None, 0, -1, "inf", "nan", "fast"):
        # pyrefly: ignore[bad-argument-type]
        assert parsed(LAYER, hosts=[host(0, 3.0), host(1, speed)]).speeds == (1.0, 1.0)


def test_experts_of_unknown_hosts_count_for_no_host() -> None:
    placement = parsed(layer([0, 7, -1, "x", None, True, 1], [1] * 7))
    assert placement.layers[0].hosts == ((0,), (), (), (), (), (), (1,))
    assert placement.unplaced_rows(rows([1, 2, 3, 4, 5, 6, 7, 8])) == 2 + 3 + 4 + 5 + 6 + 8
    assert placement.work(rows([1, 2, 3, 4, 5, 6, 7, 8])) == [[1, 7]]


def test_counts_may_be_fewer_or_more_than_the_experts() -> None:
    placement = parsed(LAYER)
    assert placement.work(rows([6])) == [[60, 0]]
    assert placement.work(rows([])) == [[0, 0]]
    assert placement.work([]) == []
    assert len(placement.work(rows([1, 1, 1], [1, 1, 1]))) == 1
    assert imbalance(placement.layer_waits(placement.times(rows([0, 0, 0])))) is None
    assert imbalance([]) is None
    assert placement.relative_times([0, 0]) is None


@pytest.mark.parametrize("hosts", [None, [], "x", {}, [1, None, "a"]])
def test_without_hosts_there_is_no_placement(hosts: Any) -> None:
    assert recorded_placement(made({"event": "placement", "hosts": hosts, "layers": [LAYER]})) is None
    assert placement_spans(decoded([{"event": "placement", "hosts": hosts}])) == []


ODD = [
    {},
    {"layers": None},
    {"layers": "x"},
    {"layers": [None, 3, "x", {}]},
    {"layers": [{"name": None, "host_of": "x", "sizes": 3, "costs": {}, "seconds": "x"}]},
    {"layers": [layer([0, 1], ["nan", 1e308], seconds=["inf", None])]},
    {"layers": [layer([0, 1], [10**400, 1], costs=[0, 0], seconds=[0, 0])]},
    {"layers": [layer([[0], {"a": 1}], [1, 1])]},
    {"hosts": [{}, {}], "layers": [LAYER]},
    {"hosts": [{"rank": "x", "node": 3, "speed": []}, {"rank": 0}], "layers": [LAYER]},
    {"step": "x", "layers": [LAYER]},
    {"step": None, "layers": [LAYER]},
]


@pytest.mark.parametrize("fields", ODD)
def test_malformed_placements_are_harmless(fields: dict[str, Any]) -> None:
    event = {"event": "placement", "hosts": [host(0), host(1)]} | fields
    placement = recorded_placement(made(event))
    assert placement is not None
    times = placement.times(token_counts(made(load(1, [10**400, "nan", 3], None, 7))))
    value = imbalance(placement.layer_waits(times))
    assert value is None or math.isfinite(value)
    assert all(len(layer.predicted_times) == 2 for layer in placement.layers)


def test_a_newborn_has_the_host_of_its_event_and_the_size_of_its_parent() -> None:
    born = expert_event(10, "born", [3], parents=[2], hosts=[[0]], experts=4)
    placement = last_placement(placement_event(LAYER), born)
    assert placement.layers[0].ids == (0, 1, 2, 3)
    assert placement.work([{0: 6, 1: 3, 2: 2, 3: 1}]) == [[60 + 30, 120]]
    assert placement.unplaced_rows([{0: 6, 3: 1}]) == 0
    assert placement.layers[0].predicted_times == (), "the prediction was for other experts"


def test_a_newborn_made_afresh_has_its_recorded_size() -> None:
    """The graph names hidden sizes, the placement the cost of a row: 10 and 20 for sizes 1 and 2."""
    experts = [{"id": 0, "size": 1}, {"id": 1, "size": 2}, {"id": 2, "size": 3}, {"id": 3, "size": 5}]
    graph = {"event": "expert_graph", "step": 12, "layers": [{"layer": 0, "experts": experts}]}
    born = expert_event(10, "born", [3], hosts=[[0]])
    assert last_placement(placement_event(LAYER), born, graph).layers[0].cost_of[3] == 50
    assert last_placement(placement_event(LAYER), born).layers[0].cost_of[3] == 20, "the mean of the layer"


def test_merged_and_pruned_experts_are_gone() -> None:
    merged = expert_event(10, "merged", [3], parents=[0, 1], hosts=[[1]])
    layers = last_placement(placement_event(LAYER), merged).layers
    assert layers[0].ids == (2, 3)
    assert layers[0].cost_of == {2: 30, 3: 10}
    pruned = expert_event(20, "pruned", [2])
    placement = last_placement(placement_event(LAYER), merged, pruned)
    assert placement.layers[0].hosts_of == {3: (1,)}
    assert placement.unplaced_rows([{2: 7, 3: 1}]) == 7


def test_the_host_of_an_expert_changes_with_a_move() -> None:
    spans = placement_spans(
        decoded([placement_event(LAYER), expert_event(10, "moved", [1, 2], hosts=[[0], [0]])])
    )
    before, after = placement_at(spans, 10), placement_at(spans, 11)
    assert before is not None
    assert after is not None
    assert before.work(rows([6, 3, 2])) == [[60, 120]]
    assert after.work(rows([6, 3, 2])) == [[180, 0]]
    assert (after.step, after.placed_step) == (10, 0)


def test_the_sentence_says_how_experts_were_placed_and_when_they_changed() -> None:
    moved = expert_event(10, "moved", [1, 2], hosts=[[0], [0]])
    again = last_placement(placement_event(LAYER, method="as before"), moved)
    assert again.sentence == "placed (as before), then changed, last at step 10"
    unknown = last_placement(placement_event(LAYER, method=None), moved)
    assert unknown.sentence == "placed, then changed, last at step 10"


def test_copies_share_the_rows_of_an_expert() -> None:
    copied = expert_event(10, "copied", [2], hosts=[[0, 1]])
    placement = last_placement(placement_event(LAYER), copied)
    assert placement.work(rows([6, 3, 2])) == [[60 + 30, 60 + 30]]
    assert [placement.layers[0].held_by(index) for index in range(2)] == [[0, 2], [1, 2]]
    assert parsed(layer([0, [0, 1]], [1, 2])).work(rows([1, 3])) == [[1 + 3, 3]]


def test_copies_may_have_other_shares() -> None:
    copied = expert_event(10, "copied", [2], hosts=[[1, 0]], splits=[[3, 1]])
    placement = last_placement(placement_event(LAYER), copied)
    assert placement.work(rows([0, 0, 2])) == [[15, 45]], "three of four rows on host 1"
    back = expert_event(20, "copied", [2], hosts=[[0, 1]], splits=[[]])
    assert last_placement(placement_event(LAYER), copied, back).work(rows([0, 0, 2])) == [[30, 30]]
    moved = expert_event(20, "moved", [0], hosts=[[1]], splits=[[]])
    assert last_placement(placement_event(LAYER), copied, moved).work(rows([1, 0, 2])) == [[15, 10 + 45]]
    placed = parsed(layer([0, [0, 1]], [1, 2], splits=[[], [1, 3]]))
    assert placed.work(rows([1, 4])) == [[1 + 2, 6]]
    for odd in ("x", [[1]], [[0, 0]], [["x", 1]], []):
        event = expert_event(10, "copied", [2], hosts=[[0, 1]], splits=odd)
        assert sum(last_placement(placement_event(LAYER), event).work(rows([0, 0, 2]))[0]) == 60


def test_an_undone_change_restores_the_placement_before_it() -> None:
    moved = expert_event(10, "moved", [1], hosts=[[0]])
    merged = expert_event(20, "merged", [3], parents=[0, 1], hosts=[[1]])
    undone = merged | {"change": "undone"}
    assert last_placement(placement_event(LAYER), moved, merged, undone) == last_placement(
        placement_event(LAYER), moved
    )


def test_a_placement_after_a_restart_names_its_experts() -> None:
    born = expert_event(10, "born", [3], parents=[2], hosts=[[0]])
    again = placement_event(layer([0, 1], [10, 20], ids=[1, 3]), step=8)
    spans = placement_spans(decoded([placement_event(LAYER), born, again]))
    assert [step for step, _ in spans] == [0, 8]
    assert last_placement(placement_event(LAYER), born, again).work([{1: 2, 3: 5}]) == [[20, 100]]


def test_loads_count_under_the_placement_of_their_step() -> None:
    """The settled loads reach back to the placement event, past changes of single experts."""
    moved = expert_event(2, "moved", [1, 2], hosts=[[0], [0]])
    loads = [load(step, [6, 3, 2]) for step in (1, 2, 3, 4)]
    settled = settled_loads(decoded([placement_event(LAYER), moved]), decoded(loads))
    assert settled is not None
    assert [(placement.step, event.step) for placement, event in settled.loads] == [(2, 3), (2, 4)]
    early = settled_loads(decoded([placement_event(LAYER), moved]), decoded(loads[:2]))
    assert early is not None
    assert [placement.step for placement, _ in early.loads] == [0], "no load was counted after the move"


@pytest.mark.parametrize(
    "fields",
    [
        {"change": "grown"},
        {"ids": []},
        {"ids": ["x"]},
        {"ids": [True]},
        {"layer": 7},
        {"layer": None},
        {"layer": -1},
        {"step": "x"},
    ],
)
def test_malformed_changes_change_nothing(fields: dict[str, Any]) -> None:
    event = expert_event(10, "pruned", [1]) | fields
    assert last_placement(placement_event(LAYER), event) == recorded_placement(made(placement_event(LAYER)))


def test_changes_with_unknown_hosts_are_harmless() -> None:
    for hosts in (None, "x", [], [["x"]], [[9]], [3]):
        placement = last_placement(placement_event(LAYER), expert_event(10, "born", [3], hosts=hosts))
        assert placement.unplaced_rows([{3: 4}]) == 4
