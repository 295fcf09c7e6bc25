"""Tests of work and waiting times of hosts, against figures computed by hand."""

import math
from typing import Any

import pytest

from orchestrator.record.events import Event
from orchestrator.record.host_balance import (
    RecordedPlacement,
    imbalance,
    mean_per_step,
    parse_placement,
    placement_at,
    placement_spans,
    settled_imbalance,
    settled_loads,
    sum_counts,
    token_counts,
)


def host(rank: int, speed: float | None = 1.0) -> dict[str, Any]:
    return {"rank": rank, "node": "10.0.0.1", "device": "cpu", "name": "EPYC", "speed": speed, "memory": None}


def layer(host_of: list[Any], sizes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"name": "blocks.0.ffn", "host_of": host_of, "sizes": sizes, **fields}


def placement_event(*layers: Any, hosts: Any = None, **fields: Any) -> Event:
    return {
        "event": "placement",
        "step": 0,
        "method": "lpt",
        "hosts": hosts or [host(0), host(1, 2.0)],
        "layers": list(layers),
        **fields,
    }


def parsed(*layers: Any, **fields: Any) -> RecordedPlacement:
    placement = parse_placement(placement_event(*layers, **fields))
    assert placement is not None
    return placement


def load(step: int, *loads: Any) -> Event:
    return {"event": "load", "step": step, "steps": 1, "loads": list(loads)}


LAYER = layer([0, 1, 1], [10, 20, 30])


def test_work_is_rows_times_size_and_time_is_work_over_speed() -> None:
    placement = parsed(LAYER)
    assert placement.work([[6, 3, 2]]) == [[60, 60 + 60]]
    assert placement.times([[6, 3, 2]]) == [[60, 60]]
    assert placement.layer_waits([[60, 60]]) == [(60, 60)]


def test_the_mean_time_is_all_work_over_all_speed() -> None:
    """The time if hosts finish together: (120 + 2 × 60) / 3, not the mean of 120 and 60."""
    placement = parsed(LAYER)
    times = placement.times([[12, 3, 2]])
    assert times == [[120, 60]]
    assert placement.mean(times[0]) == 80
    assert placement.relative_times(times[0]) == [1.5, 0.75]
    assert imbalance(placement.layer_waits(times)) == 1.5


def test_hosts_wait_in_every_layer() -> None:
    """Balanced totals are not enough: each layer has another slowest host."""
    placement = parsed(layer([0, 1], [1, 1]), layer([0, 1], [1, 1]), hosts=[host(0), host(1)])
    times = placement.times([[30, 10], [10, 30]])
    assert times == [[30, 10], [10, 30]]
    assert imbalance(placement.layer_waits(times)) == pytest.approx(60 / 40)
    assert placement.relative_times([sum(each) for each in zip(*times, strict=True)]) == [1.0, 1.0]


def test_over_a_run_the_slowest_times_are_summed() -> None:
    """The second half counts: how the gate settled, not how it began."""
    loads = [load(1, [600, 0, 0]), load(2, [0, 0, 200]), load(3, [6, 3, 2]), load(4, [12, 3, 2])]
    assert settled_imbalance([placement_event(LAYER)], loads) == pytest.approx((60 + 120) / (60 + 80))
    assert settled_imbalance([placement_event(LAYER)], []) is None
    assert settled_imbalance([], loads) is None


def test_a_host_without_experts_is_idle() -> None:
    placement = parsed(layer([0, 0], [8, 8]), hosts=[host(0), host(1), host(2)])
    assert placement.layers[0].experts_by_host == ((0, 1), (), ())
    assert imbalance(placement.layer_waits(placement.times([[5, 5]]))) == 3.0


def test_hosts_are_found_by_rank() -> None:
    placement = parsed(layer([5, 3], [1, 1]), hosts=[host(3), host(5)])
    assert placement.layers[0].experts_by_host == ((1,), (0,))


def test_each_step_counts_under_the_placement_it_ran_under() -> None:
    moved = placement_event(layer([0, 0, 1], [10, 20, 30]), step=10, hosts=[host(0), host(1)])
    spans = placement_spans([placement_event(LAYER), moved])
    assert placement_at(spans, 10) == parse_placement(placement_event(LAYER))
    assert placement_at(spans, 11) == parse_placement(moved)
    assert placement_at(spans, 0) == parse_placement(placement_event(LAYER)), (
        "the first placement holds for earlier steps"
    )
    assert placement_at([], 1) is None
    early, late = load(10, [6, 3, 2]), load(20, [6, 3, 2])
    assert settled_loads([placement_event(LAYER), moved], [early, late]) == (parse_placement(moved), [late])


def test_a_restart_removes_the_placements_of_later_steps() -> None:
    first, moved, again = (
        placement_event(LAYER),
        placement_event(LAYER, step=40),
        placement_event(LAYER, step=35, method="file"),
    )
    assert [
        (step, placement and placement.method) for step, placement in placement_spans([first, moved, again])
    ] == [
        (0, "lpt"),
        (35, "file"),
    ]
    assert [step for step, _ in placement_spans([first, placement_event(LAYER, step=0)])] == [0]


def test_a_run_resumed_without_expert_parallelism_has_no_placement() -> None:
    events = [
        placement_event(LAYER),
        load(10, [6, 3, 2]),
        {"event": "start", "step": 10, "strategy": "data_parallel"},
        load(20, [12, 3, 2]),
    ]
    spans = placement_spans(events)
    assert placement_at(spans, 20) is None
    assert settled_loads(events, [event for event in events if event["event"] == "load"]) is None
    same = [
        {"event": "start", "step": 0, "strategy": "expert_parallel"},
        placement_event(LAYER),
        {"event": "start", "step": 10},
    ]
    assert placement_at(placement_spans(same), 20) is not None


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
        assert parsed(LAYER, hosts=[host(0, 3.0), host(1, speed)]).speeds == (1.0, 1.0)  # type: ignore[arg-type]


def test_experts_of_unknown_hosts_count_for_no_host() -> None:
    placement = parsed(layer([0, 7, -1, "x", None, True, 1], [1] * 7))
    assert placement.layers[0].experts_by_host == ((0,), (6,))
    assert placement.layers[0].unplaced_rows([1, 2, 3, 4, 5, 6, 7, 8]) == 2 + 3 + 4 + 5 + 6 + 8
    assert placement.work([[1, 2, 3, 4, 5, 6, 7, 8]]) == [[1, 7]]


def test_counts_may_be_fewer_or_more_than_the_experts() -> None:
    placement = parsed(LAYER)
    assert placement.work([[6]]) == [[60, 0]]
    assert placement.work([[]]) == [[0, 0]]
    assert placement.work([]) == []
    assert len(placement.work([[1, 1, 1], [1, 1, 1]])) == 1
    assert imbalance(placement.layer_waits(placement.times([[0, 0, 0]]))) is None
    assert imbalance([]) is None
    assert placement.relative_times([0, 0]) is None


@pytest.mark.parametrize("hosts", [None, [], "x", {}, [1, None, "a"]])
def test_without_hosts_there_is_no_placement(hosts: Any) -> None:
    assert parse_placement({"event": "placement", "hosts": hosts, "layers": [LAYER]}) is None
    assert placement_spans([{"event": "placement", "hosts": hosts}]) == []


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
    placement = parse_placement(event)
    assert placement is not None
    times = placement.times(token_counts(load(1, [10**400, "nan", 3], None, 7)))
    value = imbalance(placement.layer_waits(times))
    assert value is None or math.isfinite(value)
    assert all(len(layer.predicted_times) == len(layer.experts_by_host) == 2 for layer in placement.layers)


def test_malformed_counts_are_zero() -> None:
    assert token_counts(load(1, [3, "x", -1, None, "nan"], None, "x")) == [[3, 0, 0, 0, 0], [], []]
    assert token_counts({"event": "load", "loads": "x"}) == token_counts({"event": "load"}) == []


def test_counts_of_different_shapes_are_summed() -> None:
    assert sum_counts([[[1, 2]], [[1, 2, 3], [4]], []]) == [[2, 4, 3], [4]]


def test_means_per_step_are_weighted_by_steps() -> None:
    events = [
        {"steps": 1, "bytes": 10},
        {"steps": 3, "bytes": 30},
        {"steps": 5, "bytes": None},
        {"bytes": "x"},
    ]
    assert mean_per_step(events, "bytes") == 25
    assert mean_per_step(events, "seconds") is None
    assert mean_per_step([{"bytes": 4}, {"steps": "x", "bytes": 6}], "bytes") == 5
