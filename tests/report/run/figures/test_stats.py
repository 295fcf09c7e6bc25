"""Tests of the figures that text, page and verdict share."""

import json

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record, write_events, write_run
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.types import GIB


def record_of(tmp_path, run=None, **fields):
    return run_record(tmp_path, run or FakeRun(**fields))


def test_the_speed_counts_the_units_of_the_task(tmp_path):
    dense = stats.speed(record_of(tmp_path / "a"))
    moe = stats.speed(record_of(tmp_path / "b", experts=4))
    assert dense is not None
    assert moe is not None
    assert dense.units == dense.samples
    assert moe.units == pytest.approx(moe.samples * 128, rel=1e-6)
    assert dense.median_step_s == pytest.approx(0.085, rel=0.1), "the median ignores the slow first step"


def test_without_steps_there_is_no_speed(tmp_path):
    assert stats.speed(record_of(tmp_path, steps=0)) is None


def test_phases_add_up_to_the_step(tmp_path):
    parts = stats.phase_seconds(record_of(tmp_path))
    assert list(parts) == ["data", "forward", "backward", "optimizer", "other"]
    assert sum(parts.values()) == pytest.approx(0.08)
    assert stats.shares(parts)["backward"] == pytest.approx(0.5)


def test_phases_are_weighted_by_their_steps(tmp_path):
    events = [
        {"event": "phases", "step": 1, "steps": 1, "data": 1.0, "total": 1.0},
        {"event": "phases", "step": 10, "steps": 9, "data": 0.0, "forward": 1.0, "total": 1.0},
    ]
    parts = stats.phase_seconds(events_record(tmp_path, events))
    assert parts["data"] == pytest.approx(0.1)
    assert parts["forward"] == pytest.approx(0.9)


def test_phases_leave_out_the_warm_up(tmp_path):
    events = [
        {"event": "phases", "step": 3, "steps": 3, "data": 9.0, "total": 9.0, "warm_up": True},
        {"event": "phases", "step": 10, "steps": 7, "data": 1.0, "total": 2.0},
    ]
    assert stats.phase_seconds(events_record(tmp_path, events)) == {"data": 1.0, "other": 1.0}


def test_wall_time_includes_replayed_steps(tmp_path):
    record = record_of(tmp_path, steps=40, resume_at=27)
    wall = stats.wall_seconds(record)
    assert sum(wall.values()) == pytest.approx(record.seconds)
    recorded = of_kind(read_events(record.folder / "events.jsonl"), "step")
    assert len(recorded) > len(record.steps)
    assert wall["training"] == pytest.approx(sum(event["seconds"] for event in recorded))


def test_memory_is_the_highest_peak(tmp_path):
    peak = stats.memory(record_of(tmp_path, gpu=True, peak_bytes=10 * GIB))
    assert peak is not None
    assert peak.allocated == 10 * GIB
    assert peak.efficiency == pytest.approx(1 / 1.18, rel=1e-3)
    assert peak.estimate == pytest.approx(9 * GIB, rel=0.05)


def test_parts_of_the_memory_are_those_of_the_largest_peak(tmp_path):
    def epoch(number, allocated, parts):
        memory = {"allocated": allocated, "parts": parts, "worker": number}
        return {"event": "epoch", "step": number, "epoch": number, "memory": memory}

    odd = {"parameters": 9, "gradients": "many", "unknown": 3, "activations": float("nan")}
    events = [epoch(0, 10, {"parameters": 4}), epoch(1, 30, odd), epoch(2, 20, {"parameters": 7})]
    write_events(tmp_path, events)
    (tmp_path / "plan.json").write_text('{"memory": {"parameters": 8, "gate": 2, "average": 0, "total": 10}}')
    record = read_run_record(tmp_path)
    assert stats.memory_parts(record) == [
        stats.MemoryPart("parameters", 8, 9),
        stats.MemoryPart("gate", 2, None),
    ]
    use = stats.memory(record)
    assert use is not None
    assert (use.allocated, use.worker) == (30, 1)


def test_the_peak_at_the_end_of_a_run_counts(tmp_path):
    end = {"event": "end", "status": "completed", "reason": "", "memory": {"allocated": 50, "parts": [1]}}
    epoch = {"event": "epoch", "step": 1, "epoch": 0, "memory": {"allocated": 40}}
    use = stats.memory(events_record(tmp_path, [epoch, end]))
    assert use is not None
    assert use.allocated == 50
    assert stats.memory_parts(events_record(tmp_path, [epoch, end])) == []


def test_memory_without_reserved_bytes_has_no_efficiency(tmp_path):
    peak = stats.memory(record_of(tmp_path))
    assert peak is not None
    assert peak.efficiency is None


def test_the_best_evaluation_follows_the_watched_metric(tmp_path):
    def evaluate(step, loss, accuracy):
        return {"event": "evaluate", "step": step, "loss": loss, "metrics": {"accuracy": accuracy}}

    evaluations = [evaluate(1, 0.2, 0.5), evaluate(2, 0.4, 0.9), evaluate(3, "nan", "nan")]

    def best_step(best_by):
        write_events(tmp_path, [{"event": "start", "step": 0, "best_by": best_by}, *evaluations])
        best = stats.best_evaluation(read_run_record(tmp_path))
        return best.step if best else None

    assert best_step(None) == 1
    assert best_step("accuracy:max") == 2
    assert best_step("accuracy:min") == 1
    evaluations += [evaluate(4, 0.3, 0.9), evaluate(5, 0.35, 0.9), evaluate(6, "nan", 0.9)]
    assert best_step("accuracy:max") == 4
    for damaged in ("unknown_metric:max", "churn", "accuracy:up", 7):
        assert best_step(damaged) == 1
        assert stats.watched_metric(read_run_record(tmp_path)) == "loss"


def test_monitored_figures_name_host_and_devices(tmp_path):
    figures = {item.name: item for item in stats.monitored_figures(record_of(tmp_path, gpu=True))}
    assert figures["gpu 0 utilization"].mean == pytest.approx(88, abs=2)
    assert figures["gpu 0 utilization"].peak >= figures["gpu 0 utilization"].mean
    assert figures["gpu 0 memory"].unit == "B"
    assert {"host cpu", "process memory", "gpu 0 power", "gpu 0 temperature"} <= figures.keys()


def test_missing_values_are_left_out(tmp_path):
    write_events(
        tmp_path,
        [{"event": "monitor", "step": 1, "host": {}, "devices": [{"index": 0, "utilization": None}]}],
    )
    assert stats.monitored_figures(read_run_record(tmp_path)) == []
    assert stats.gpu_utilization(read_run_record(tmp_path)) is None


def test_non_finite_losses_are_described(tmp_path):
    assert stats.non_finite_text(record_of(tmp_path / "a")) is None
    assert (
        stats.non_finite_text(record_of(tmp_path / "b", broken={7: "nan"}))
        == "the loss of 1 step, first at step 7"
    )


def test_malformed_events_are_harmless(tmp_path):
    odd = {
        "metrics": [1],
        "host": "x",
        "devices": {"a": 1},
        "memory": 3,
        "loss": {},
        "seconds": "long",
        "units": [],
        "total": "t",
    }
    write_events(tmp_path, [event | odd for event in run_events(FakeRun(steps=12, epochs=1))])
    record = read_run_record(tmp_path)
    assert stats.speed(record) is None
    assert stats.phase_seconds(record) == {}
    assert stats.memory(record) is None
    assert stats.monitored_figures(record) == []
    assert stats.metric_names(record) == []


def test_a_device_has_its_product_name(tmp_path):
    assert stats.device_name(record_of(tmp_path / "a", gpu=True)) == "NVIDIA H200 · cuda:0"
    folder = write_run(tmp_path / "b", FakeRun(gpu=True))
    inventory = {"gpus": [{"index": 0, "name": "NVIDIA L4"}], "cpu_name": "EPYC"}
    (folder / "plan.json").write_text(json.dumps({"hardware": inventory}))
    assert stats.device_name(read_run_record(folder)) == "NVIDIA L4 · cuda:0"
    folder = write_run(tmp_path / "c", FakeRun())
    (folder / "plan.json").write_text(json.dumps({"hardware": inventory}))
    assert stats.device_name(read_run_record(folder)) == "EPYC · cpu"


def test_a_unit_has_the_name_of_the_run(tmp_path):
    assert stats.unit_name(events_record(tmp_path / "a", [{"event": "start", "unit": "frames"}])) == "frames"
    assert stats.unit_name(events_record(tmp_path / "b", [])) == "tokens"


def test_a_successful_compilation_needs_no_event(tmp_path):
    folder = write_run(tmp_path, FakeRun())
    (folder / "plan.json").write_text(
        json.dumps({"choices": {"compile": {"value": True, "reason": "--compile"}}})
    )
    assert stats.is_compiled(read_run_record(folder))
    write_events(folder, [{"event": "compile", "status": "failed"}])
    assert not stats.is_compiled(read_run_record(folder))
