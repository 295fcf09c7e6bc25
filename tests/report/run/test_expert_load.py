import pytest

from orchestrator.report.run.expert_load import MAX_COLUMNS, busiest, doublings, idlest, layer_loads
from orchestrator.report.run.read import read_run_record
from tests.support.fake_run import FakeRun, write_events, write_run


def loads_of(tmp_path, *loads):
    return layer_loads(
        read_run_record(
            write_events(
                tmp_path, [{"event": "load", "step": i + 1, "loads": load} for i, load in enumerate(loads)]
            )
        )
    )


def test_ratios_are_against_the_even_share(tmp_path):
    (layer,) = loads_of(tmp_path, [[30, 10, 20, 20]])
    assert [row[0] for row in layer.ratios] == [1.5, 0.5, 1.0, 1.0]
    assert busiest([layer]) == (0, 1.5)


def test_the_verdict_on_balance_is_of_the_second_half(tmp_path):
    (layer,) = loads_of(tmp_path, [[100, 0]], [[100, 0]], [[50, 50]], [[50, 50]])
    assert layer.recent() == [1.0, 1.0]


def test_many_events_become_few_columns_and_no_token_is_lost(tmp_path):
    (layer,) = loads_of(tmp_path, *[[[3, 1]]] * 1000)
    assert len(layer.steps) <= MAX_COLUMNS
    assert layer.steps[-1] == 1000
    assert layer.ratios[0] == [1.5] * len(layer.steps)


def test_an_expert_born_later_has_no_past(tmp_path):
    (layer,) = loads_of(tmp_path, [[10, 10]], [[10, 10, 10]])
    assert layer.ratios[2] == [None, 1.0]


def test_layers_without_tokens_or_of_another_shape_are_left_out(tmp_path):
    assert loads_of(tmp_path / "a", [[0, 0], []]) == []
    assert loads_of(tmp_path / "b", "none", None, [3, "x"]) == []
    assert busiest([]) is None


def test_layers_and_experts_of_a_run(tmp_path):
    layers = layer_loads(read_run_record(write_run(tmp_path, FakeRun(experts=6, layers=3))))
    assert [(layer.layer, layer.experts) for layer in layers] == [(0, 6), (1, 6), (2, 6)]
    assert all(sum(row[0] or 0 for row in layer.ratios) == pytest.approx(6, rel=1e-6) for layer in layers)


@pytest.mark.parametrize(("ratio", "expected"), [(1, 0), (2, 1), (0.5, -1), (64, 2), (0, -2), (-1, -2)])
def test_colours_go_by_doublings(ratio, expected):
    assert doublings(ratio) == expected


def test_idle_experts_are_counted_where_they_are_most(tmp_path):
    layers = loads_of(tmp_path, [[10, 10, 10, 10], [20, 20, 0, 0], [30, 5, 5, 0]])
    assert idlest(layers) == (1, 2, 4)
    assert idlest(layers[:1]) is None
    assert idlest([]) is None
