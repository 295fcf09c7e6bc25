"""Tests of the load of the experts' hosts."""

from dataclasses import replace

import pytest

from harness.fakes.fake_events import FakeRun, placement
from harness.fakes.fake_evolution import EVOLVING_HOSTS, FINAL_IDS, evolving_events, evolving_record
from harness.fakes.fake_run import events_record, run_record
from harness.runs.records import decoded
from orchestrator.record.summary.speed import speed_of
from orchestrator.record.summary.summary import summarise
from orchestrator.report.run.figures.host_load import (
    MAX_BARS,
    exchange_cost,
    host_load,
    ids_text,
    num_experts_text,
    slowest_text,
    steps_text,
)

HOSTED = FakeRun(hosted=True, workers=3, experts=5, layers=2)
PLACED = {"event": "placement"} | placement(FakeRun(experts=2, layers=1, sizes=(10, 20)), 2)


def load(step, *loads):
    return {"event": "load", "step": step, "steps": 10, "loads": list(loads)}


def load_of(tmp_path, *events):
    return host_load(events_record(tmp_path, list(events)))


def test_the_load_of_a_run(tmp_path):
    result = host_load(run_record(tmp_path, HOSTED))
    assert result is not None
    assert [layer.name for layer in result.layers] == ["blocks.0.ffn", "blocks.1.ffn"]
    assert [num_experts_text(result, host) for host in range(3)] == [
        "1 expert per layer",
        "2 experts per layer",
        "2 experts per layer",
    ]
    assert list(result.layers[0].shares.values()) == pytest.approx(
        [32 / 544, 64 / 544, 64 / 544, 128 / 544, 256 / 544]
    )
    assert result.predicted_imbalance == pytest.approx(256 * 3 / 544)
    assert sum(result.work or ()) == pytest.approx(1)
    assert sum(result.measured or ()) == pytest.approx(3)
    assert steps_text(result) == "steps 61 to 120"
    assert result.unplaced == 0


def test_the_second_half_counts_as_in_the_summary(tmp_path):
    record = events_record(tmp_path, [PLACED, load(10, [400, 0]), load(20, [100, 50])])
    result = host_load(record)
    assert result is not None
    assert result.placement.layers[0].hosts == ((1,), (0,))
    assert result.measured == [1.0, 1.0]
    assert result.work == [0.5, 0.5]
    assert result.imbalance == 1.0
    assert result.steps == (11, 20)
    assert summarise(record.events)["imbalance"] == result.imbalance
    assert result.layers[0].use == pytest.approx({0: 100 / 75, 1: 50 / 75})


def test_loads_under_an_earlier_placement_do_not_count(tmp_path):
    moved = PLACED | {"step": 20}
    result = load_of(tmp_path, PLACED, load(10, [1, 1]), load(20, [1, 1]), moved, load(30, [9, 1]))
    assert result is not None
    assert result.steps == (21, 30)
    # pyrefly: ignore[missing-attribute]
    assert load_of(tmp_path, PLACED, load(20, [1, 1]), moved).steps is None


def test_different_speeds_are_shown(tmp_path):
    mixed = host_load(
        run_record(tmp_path / "a", FakeRun(hosted=True, workers=3, experts=5, speeds=(1.0, 2.0, 4.0)))
    )
    alike = host_load(run_record(tmp_path / "b", HOSTED))
    assert mixed is not None
    assert alike is not None
    assert [mixed.relative_speed_text(host) for host in range(3)] == ["speed 1×", "speed 2×", "speed 4×"]
    assert alike.relative_speed_text(0) == ""


def test_experts_of_many_hosts_are_not_shown_one_by_one(tmp_path):
    few, many = (
        host_load(run_record(tmp_path / str(n), FakeRun(hosted=True, workers=n, experts=5, steps=20)))
        for n in (6, 7)
    )
    assert few is not None
    assert many is not None
    assert (few.shows_experts, many.shows_experts) == (True, False)
    assert len(few.layers) * len(few.hosts) == MAX_BARS


def test_rows_of_unplaced_experts_are_counted(tmp_path):
    result = load_of(tmp_path, PLACED, load(10, [1, 1, 2], [4]))
    assert result is not None
    assert result.unplaced == pytest.approx(6 / 8)
    assert result.work == pytest.approx([20 / 30, 10 / 30])


def test_without_loads_there_is_only_the_prediction(tmp_path):
    result = load_of(tmp_path, PLACED)
    assert result is not None
    assert (result.measured, result.work, result.imbalance, result.steps) == (None, None, None, None)
    assert result.predicted == pytest.approx([4 / 3, 2 / 3])
    assert result.layers[0].use == {0: None, 1: None}
    assert steps_text(result) == "no load was counted"


def test_without_a_placement_there_is_no_load(tmp_path):
    assert load_of(tmp_path / "a", load(1, [1, 1])) is None
    assert load_of(tmp_path / "b", PLACED | {"layers": []}) is None
    assert load_of(tmp_path / "c", PLACED, {"event": "start", "step": 5, "strategy": "data_parallel"}) is None


def test_the_slowest_host_over_all_steps_differs_from_the_imbalance(tmp_path):
    """Hosts that are slow in turn are balanced over the steps, although each step waits for one of them."""
    result = load_of(
        tmp_path, PLACED, load(10, [9, 9]), load(20, [9, 9]), load(30, [200, 0]), load(40, [0, 100])
    )
    assert result is not None
    assert result.measured == result.layers[0].measured == [1.0, 1.0]
    assert (result.slowest, result.layers[0].slowest) == (1.0, 1.0)
    assert result.imbalance == 2.0
    assert slowest_text(result.slowest, 1.5) == "slowest host 1.00× the mean, predicted 1.50×"


def test_the_placement_after_a_recovery_counts(tmp_path):
    result = host_load(run_record(tmp_path, FakeRun(hosted=True, workers=3, experts=5, recover_at=77)))
    assert result is not None
    assert (len(result.hosts), result.placement.step) == (2, 60)


def test_the_exchange_per_step_and_its_share(tmp_path):
    record = run_record(tmp_path / "a", FakeRun(hosted=True, workers=2, experts=4, exchange=0.3))
    result = exchange_cost(record)
    assert result is not None
    assert result.rows == 64 * 128 * 2 * 4 / 2
    assert result.bytes == 64 * 128 * 2 * 4 / 2 * 1024
    assert result.seconds == pytest.approx(0.3 * 0.08)
    measured = speed_of(record.steps)
    assert measured is not None
    assert result.share == pytest.approx(0.3 * 0.08 / measured.mean_step_s)
    assert exchange_cost(run_record(tmp_path / "b", FakeRun(experts=4))) is None


def test_an_exchange_without_steps_or_with_damaged_figures_has_no_share(tmp_path):
    single = exchange_cost(
        events_record(tmp_path / "b", [{"event": "exchange", "step": 1, "seconds": 2.0, "bytes": "x"}])
    )
    assert single is not None
    assert (single.seconds, single.share, single.bytes, single.rows) == (2.0, None, None, None)
    assert (
        exchange_cost(
            events_record(
                tmp_path / "c", [{"event": "exchange", "step": 1}, {"event": "exchange", "bytes": 1}]
            )
        )
        is None
    )


def test_ids_in_short():
    assert ids_text([0, 1, 2, 3, 7]) == "0–3, 7"
    assert ids_text([0, 1, 5]) == "0, 1, 5"
    assert ids_text([]) == ""


def test_experts_are_shown_where_they_are_at_the_end(tmp_path):
    result = host_load(evolving_record(tmp_path, EVOLVING_HOSTS))
    assert result is not None
    first, second = result.layers
    assert set(first.placement.ids) == set(FINAL_IDS[0])
    assert first.placement.hosts_of[4] == (2,), "it was moved"
    assert first.placement.hosts_of[2] == (0, 1), "it was copied"
    assert set(first.use) == set(FINAL_IDS[0])
    assert all(use is not None for use in first.use.values())
    assert set(second.shares) == set(FINAL_IDS[1])
    assert sum(second.shares.values()) == pytest.approx(1)
    assert result.unplaced == 0
    assert (result.predicted, result.predicted_imbalance, first.predicted) == (None, None, None)
    assert steps_text(result) == "steps 61 to 120"
    assert result.imbalance == summarise(decoded(evolving_events(EVOLVING_HOSTS)))["imbalance"]
    assert sum(result.measured or ()) == pytest.approx(3)


def test_a_recovery_names_the_experts_of_its_placement(tmp_path):
    run = replace(EVOLVING_HOSTS, recover_at=77)
    result = host_load(evolving_record(tmp_path, run))
    assert result is not None
    assert len(result.hosts) == 2
    assert set(result.layers[0].placement.ids) == set(FINAL_IDS[0])
