import pytest

from orchestrator.record.summary import summarise
from orchestrator.report.run.host_load import (
    MAX_BARS,
    exchange_cost,
    held_text,
    host_load,
    ids_text,
    slowest_text,
    span_text,
)
from orchestrator.report.run.read import read_run_record
from tests.support.fake_run import FakeRun, placement, run_events, write_events, write_run

HOSTED = FakeRun(hosted=True, workers=3, experts=5, layers=2)
PLACED = {"event": "placement"} | placement(FakeRun(experts=2, layers=1, sizes=(10, 20)), 2)


def load(step, *loads):
    return {"event": "load", "step": step, "steps": 10, "loads": list(loads)}


def hosting_of(tmp_path, *events):
    return host_load(read_run_record(write_events(tmp_path, list(events))))


def test_where_the_experts_of_a_run_live(tmp_path):
    found = host_load(read_run_record(write_run(tmp_path, HOSTED)))
    assert found is not None
    assert [layer.name for layer in found.layers] == ["blocks.0.ffn", "blocks.1.ffn"]
    assert [held_text(found, host) for host in range(3)] == [
        "1 expert per layer",
        "2 experts per layer",
        "2 experts per layer",
    ]
    assert found.layers[0].shares == pytest.approx([32 / 544, 64 / 544, 64 / 544, 128 / 544, 256 / 544])
    assert found.predicted_imbalance == pytest.approx(256 * 3 / 544)
    assert sum(found.work or ()) == pytest.approx(1)
    assert sum(found.measured or ()) == pytest.approx(3)
    assert span_text(found) == "steps 61 to 120"
    assert found.unplaced == 0


def test_the_second_half_counts_and_the_summary_says_the_same(tmp_path):
    record = read_run_record(write_events(tmp_path, [PLACED, load(10, [400, 0]), load(20, [100, 50])]))
    found = host_load(record)
    assert found is not None
    assert found.placement.layers[0].host_of == (1, 0)
    assert found.measured == [1.0, 1.0]
    assert found.work == [0.5, 0.5]
    assert found.imbalance == 1.0
    assert found.steps == (11, 20)
    assert summarise(record.events)["imbalance"] == found.imbalance
    assert found.layers[0].use == pytest.approx([100 / 75, 50 / 75])


def test_what_was_counted_under_an_earlier_placement_is_not_this_ones(tmp_path):
    moved = PLACED | {"step": 20}
    found = hosting_of(tmp_path, PLACED, load(10, [1, 1]), load(20, [1, 1]), moved, load(30, [9, 1]))
    assert found is not None
    assert found.steps == (21, 30)
    assert hosting_of(tmp_path, PLACED, load(20, [1, 1]), moved).steps is None  # type: ignore[union-attr]


def test_hosts_that_differ_say_so(tmp_path):
    mixed = host_load(
        read_run_record(
            write_run(tmp_path / "a", FakeRun(hosted=True, workers=3, experts=5, speeds=(1.0, 2.0, 4.0)))
        )
    )
    alike = host_load(read_run_record(write_run(tmp_path / "b", HOSTED)))
    assert mixed is not None
    assert alike is not None
    assert [mixed.pace(host) for host in range(3)] == ["speed 1×", "speed 2×", "speed 4×"]
    assert alike.pace(0) == ""


def test_many_hosts_and_layers_are_not_shown_one_by_one(tmp_path):
    few, many = (
        host_load(
            read_run_record(
                write_run(tmp_path / str(n), FakeRun(hosted=True, workers=n, experts=5, steps=20))
            )
        )
        for n in (6, 7)
    )
    assert few is not None
    assert many is not None
    assert (few.detailed, many.detailed) == (True, False)
    assert len(few.layers) * len(few.hosts) == MAX_BARS


def test_rows_of_experts_nobody_placed_are_told(tmp_path):
    found = hosting_of(tmp_path, PLACED, load(10, [1, 1, 2], [4]))
    assert found is not None
    assert found.unplaced == pytest.approx(6 / 8)
    assert found.work == pytest.approx([20 / 30, 10 / 30])


def test_without_loads_the_prediction_stands_alone(tmp_path):
    found = hosting_of(tmp_path, PLACED)
    assert found is not None
    assert (found.measured, found.work, found.imbalance, found.steps) == (None, None, None, None)
    assert found.predicted == pytest.approx([4 / 3, 2 / 3])
    assert found.layers[0].use == [None, None]
    assert span_text(found) == "no load was counted"


def test_no_placement_no_hosts(tmp_path):
    assert hosting_of(tmp_path / "a", load(1, [1, 1])) is None
    assert hosting_of(tmp_path / "b", PLACED | {"layers": []}) is None
    assert (
        hosting_of(tmp_path / "c", PLACED, {"event": "start", "step": 5, "strategy": "data_parallel"}) is None
    )


def test_what_a_picture_says_is_what_it_shows(tmp_path):
    """Hosts that are slow in turn are even over the steps, though each step waits for one of them."""
    found = hosting_of(
        tmp_path, PLACED, load(10, [9, 9]), load(20, [9, 9]), load(30, [200, 0]), load(40, [0, 100])
    )
    assert found is not None
    assert found.measured == found.layers[0].measured == [1.0, 1.0]
    assert (found.slowest, found.layers[0].slowest) == (1.0, 1.0)
    assert found.imbalance == 2.0
    assert slowest_text(found.slowest, 1.5) == "slowest host 1.00× the mean, predicted 1.50×"


def test_fewer_hosts_after_a_recovery(tmp_path):
    found = host_load(
        read_run_record(write_run(tmp_path, FakeRun(hosted=True, workers=3, experts=5, recover_at=77)))
    )
    assert found is not None
    assert (len(found.hosts), found.placement.step) == (2, 60)


def test_the_exchange_per_step_and_its_share(tmp_path):
    found = exchange_cost(
        read_run_record(write_run(tmp_path / "a", FakeRun(hosted=True, workers=2, experts=4, exchange=0.3)))
    )
    assert found is not None
    assert found.rows == 64 * 128 * 2 * 4 / 2
    assert found.bytes == 64 * 128 * 2 * 4 / 2 * 1024
    assert found.seconds == pytest.approx(0.3 * 0.08)
    assert found.share == pytest.approx(0.3)
    assert exchange_cost(read_run_record(write_run(tmp_path / "b", FakeRun(experts=4)))) is None


def test_the_exchange_without_phases_is_held_against_the_median_step(tmp_path):
    events = [
        event
        for event in run_events(FakeRun(hosted=True, workers=2, experts=4, exchange=0.3))
        if event["event"] != "phases"
    ]
    found = exchange_cost(read_run_record(write_events(tmp_path / "a", events)))
    assert found is not None
    assert found.share == pytest.approx(0.3, rel=0.1)
    alone = exchange_cost(
        read_run_record(
            write_events(tmp_path / "b", [{"event": "exchange", "step": 1, "seconds": 2.0, "bytes": "x"}])
        )
    )
    assert alone is not None
    assert (alone.seconds, alone.share, alone.bytes, alone.rows) == (2.0, None, None, None)
    assert (
        exchange_cost(
            read_run_record(
                write_events(
                    tmp_path / "c", [{"event": "exchange", "step": 1}, {"event": "exchange", "bytes": 1}]
                )
            )
        )
        is None
    )


def test_ids_in_short():
    assert ids_text([0, 1, 2, 3, 7]) == "0–3, 7"
    assert ids_text([0, 1, 5]) == "0, 1, 5"
    assert ids_text([]) == ""
