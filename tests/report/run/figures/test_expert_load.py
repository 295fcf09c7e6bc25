"""Tests of the use of the experts."""

import pytest

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.figures.expert_load import (
    MAX_COLUMNS,
    busiest_layer,
    clipped_log2,
    idlest_layer,
    layer_loads,
)


def loads_of(tmp_path, *loads):
    return layer_loads(
        events_record(
            tmp_path, [{"event": "load", "step": i + 1, "loads": load} for i, load in enumerate(loads)]
        )
    )


def test_ratios_are_relative_to_the_even_share(tmp_path):
    (layer,) = loads_of(tmp_path, [[30, 10, 20, 20]])
    assert [row[0] for row in layer.ratios] == [1.5, 0.5, 1.0, 1.0]
    assert busiest_layer([layer]) == (0, 1.5)


def test_recent_ratios_are_those_of_the_second_half(tmp_path):
    (layer,) = loads_of(tmp_path, [[100, 0]], [[100, 0]], [[50, 50]], [[50, 50]])
    assert layer.recent() == [1.0, 1.0]


def test_many_events_are_summed_to_few_columns(tmp_path):
    (layer,) = loads_of(tmp_path, *[[[3, 1]]] * 1000)
    assert len(layer.steps) <= MAX_COLUMNS
    assert layer.steps[-1] == 1000
    assert layer.ratios[0] == [1.5] * len(layer.steps)


def test_an_expert_created_later_has_no_earlier_ratios(tmp_path):
    (layer,) = loads_of(tmp_path, [[10, 10]], [[10, 10, 10]])
    assert layer.ratios[2] == [None, 1.0]


def test_empty_and_malformed_layers_are_left_out(tmp_path):
    assert loads_of(tmp_path / "a", [[0, 0], []]) == []
    assert loads_of(tmp_path / "b", "none", None, [3, "x"]) == []
    assert busiest_layer([]) is None


def test_layers_and_experts_of_a_run(tmp_path):
    layers = layer_loads(run_record(tmp_path, FakeRun(experts=6, layers=3)))
    assert [(layer.layer, layer.num_experts) for layer in layers] == [(0, 6), (1, 6), (2, 6)]
    assert all(sum(row[0] or 0 for row in layer.ratios) == pytest.approx(6, rel=1e-6) for layer in layers)


@pytest.mark.parametrize(("ratio", "expected"), [(1, 0), (2, 1), (0.5, -1), (64, 2), (0, -2), (-1, -2)])
def test_colours_show_the_clipped_log2(ratio, expected):
    assert clipped_log2(ratio) == expected


def test_idle_experts_are_counted_in_the_layer_with_most(tmp_path):
    layers = loads_of(tmp_path, [[10, 10, 10, 10], [20, 20, 0, 0], [30, 5, 5, 0]])
    assert idlest_layer(layers) == (1, 2, 4)
    assert idlest_layer(layers[:1]) is None
    assert idlest_layer([]) is None


def test_rows_are_the_experts_that_ever_existed_and_blank_outside_their_life(tmp_path):
    first, second = layer_loads(evolving_record(tmp_path))
    assert first.ids == [0, 1, 2, 3, 4, 5]
    rows = dict(zip(first.ids, first.ratios, strict=True))
    lives = {expert: [ratio is not None for ratio in row].count(True) for expert, row in rows.items()}
    assert first.steps == list(range(10, 121, 10))
    assert lives == {0: 5, 1: 8, 2: 12, 3: 5, 4: 10, 5: 7}
    assert all(ratio is None for ratio in [*rows[0][5:], *rows[1][8:], *rows[4][:2], *rows[5][:5]])
    assert (first.num_experts, second.num_experts) == (3, 5)
    assert first.final_ids == {2, 4, 5}
    assert first.has_changed


def test_an_undone_newborn_has_no_row(tmp_path):
    assert 6 not in layer_loads(evolving_record(tmp_path))[0].ids


def test_removed_experts_are_not_idle(tmp_path):
    """Expert 1 receives nothing in the second half, and is pruned before the end."""
    events = [
        {"event": "load", "step": step, "loads": [loads], "ids": [ids]}
        for step, loads, ids in (
            (1, [10, 10], [0, 1]),
            (2, [20, 0], [0, 1]),
            (3, [20, 0], [0, 1]),
            (4, [20, 20], [0, 2]),
        )
    ]
    (layer,) = layer_loads(events_record(tmp_path, events))
    assert layer.recent() == [(2 + 1) / 2, 1.0]
    assert idlest_layer([layer]) is None


def test_a_column_over_several_events_counts_an_expert_from_its_birth_on(tmp_path):
    before = {"event": "load", "loads": [[10, 10]]}
    after = {"event": "load", "loads": [[10, 10, 10]], "ids": [[0, 1, 7]]}
    events = [before | {"step": step} for step in range(1, MAX_COLUMNS)]
    events += [after | {"step": step} for step in range(MAX_COLUMNS, 2 * MAX_COLUMNS + 1)]
    (layer,) = layer_loads(events_record(tmp_path, events))
    assert layer.ids == [0, 1, 7]
    assert set(layer.ratios[0]) == {1.0}
    assert set(layer.ratios[2]) == {None, 1.0}
