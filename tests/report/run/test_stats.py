import json

import pytest

from orchestrator.report.run import stats as figures
from orchestrator.report.run.read import read_run_record
from orchestrator.types import GIB
from tests.support.fake_run import FakeRun, run_events, write_events, write_run


def record_of(tmp_path, run=None, **fields):
    return read_run_record(write_run(tmp_path, run or FakeRun(**fields)))


def test_throughput_counts_tokens_only_where_they_differ(tmp_path):
    dense = figures.throughput(record_of(tmp_path / "a"))
    moe = figures.throughput(record_of(tmp_path / "b", experts=4))
    assert dense is not None
    assert moe is not None
    assert dense.units is None
    assert moe.units == pytest.approx(moe.samples * 128, rel=1e-6)
    assert dense.step_s == pytest.approx(0.085, rel=0.1), "the median forgets the slow first step"


def test_no_steps_no_throughput(tmp_path):
    assert figures.throughput(record_of(tmp_path, steps=0)) is None


def test_phases_add_up_to_the_step(tmp_path):
    parts = figures.phase_seconds(record_of(tmp_path))
    assert list(parts) == ["data", "forward", "backward", "optimizer", "other"]
    assert sum(parts.values()) == pytest.approx(0.08)
    assert figures.shares(parts)["backward"] == pytest.approx(0.5)


def test_phases_are_weighted_by_their_steps(tmp_path):
    events = [
        {"event": "phases", "step": 1, "steps": 1, "data": 1.0, "total": 1.0},
        {"event": "phases", "step": 10, "steps": 9, "data": 0.0, "forward": 1.0, "total": 1.0},
    ]
    parts = figures.phase_seconds(read_run_record(write_events(tmp_path, events)))
    assert parts["data"] == pytest.approx(0.1)
    assert parts["forward"] == pytest.approx(0.9)


def test_the_wall_counts_replayed_steps(tmp_path):
    record = record_of(tmp_path, steps=40, resume_at=27)
    wall = figures.wall_seconds(record)
    assert sum(wall.values()) == pytest.approx(record.seconds)
    assert wall["training"] == pytest.approx(sum(event["seconds"] for event in record.of("step")))


def test_memory_is_the_highest_peak(tmp_path):
    peak = figures.memory(record_of(tmp_path, gpu=True, peak_bytes=10 * GIB))
    assert peak is not None
    assert peak.allocated == 10 * GIB
    assert peak.efficiency == pytest.approx(1 / 1.18, rel=1e-3)
    assert peak.estimate == pytest.approx(9 * GIB, rel=0.05)


def test_memory_without_a_reserve_has_no_efficiency(tmp_path):
    peak = figures.memory(record_of(tmp_path))
    assert peak is not None
    assert peak.efficiency is None


def test_the_best_evaluation_follows_the_watched_metric(tmp_path):
    def evaluate(step, loss, accuracy):
        return {"event": "evaluate", "step": step, "loss": loss, "metrics": {"accuracy": accuracy}}

    write_events(tmp_path, [evaluate(1, 0.2, 0.5), evaluate(2, 0.4, 0.9), evaluate(3, "nan", "nan")])
    assert (figures.best_evaluation(read_run_record(tmp_path)) or {})["step"] == 1
    (tmp_path / "config.yaml").write_text("run: {early_stopping_metric: accuracy}\n")
    assert (figures.best_evaluation(read_run_record(tmp_path)) or {})["step"] == 2
    (tmp_path / "config.yaml").write_text("run: {early_stopping_metric: unheard_of}\n")
    assert figures.watched_metric(read_run_record(tmp_path)) == "loss"


def test_device_use_names_host_and_devices(tmp_path):
    use = {item.name: item for item in figures.device_use(record_of(tmp_path, gpu=True))}
    assert use["gpu 0 utilization"].mean == pytest.approx(88, abs=2)
    assert use["gpu 0 utilization"].peak >= use["gpu 0 utilization"].mean
    assert use["gpu 0 memory"].unit == "B"
    assert {"host cpu", "process memory", "gpu 0 power", "gpu 0 temperature"} <= use.keys()


def test_values_the_driver_does_not_give_are_left_out(tmp_path):
    write_events(
        tmp_path,
        [{"event": "monitor", "step": 1, "host": {}, "devices": [{"index": 0, "utilization": None}]}],
    )
    assert figures.device_use(read_run_record(tmp_path)) == []
    assert figures.gpu_utilization(read_run_record(tmp_path)) is None


def test_flops_in_words():
    assert figures.flops_text(4.853e14) == "485.3 TFLOP/s"
    assert figures.flops_text(12) == "12 FLOP/s"


def test_losses_that_are_no_number_are_told(tmp_path):
    assert figures.not_finite(record_of(tmp_path / "a")) is None
    assert (
        figures.not_finite(record_of(tmp_path / "b", broken={7: "nan"}))
        == "the loss of 1 step, first at step 7"
    )


def test_events_of_another_shape_harm_nothing(tmp_path):
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
    assert figures.throughput(record) is None
    assert figures.phase_seconds(record) == {}
    assert figures.memory(record) is None
    assert figures.device_use(record) == []
    assert figures.metric_names(record) == []


def test_a_device_goes_by_its_makers_name(tmp_path):
    assert figures.device_name(record_of(tmp_path / "a", gpu=True)) == "NVIDIA H200 · cuda:0"
    folder = write_run(tmp_path / "b", FakeRun(gpu=True))
    inventory = {"gpus": [{"index": 0, "name": "NVIDIA L4"}], "cpu_name": "EPYC"}
    (folder / "plan.json").write_text(json.dumps({"hardware": inventory}))
    assert figures.device_name(read_run_record(folder)) == "NVIDIA L4 · cuda:0"
    folder = write_run(tmp_path / "c", FakeRun())
    (folder / "plan.json").write_text(json.dumps({"hardware": inventory}))
    assert figures.device_name(read_run_record(folder)) == "EPYC · cpu"


def test_a_unit_has_the_name_the_run_gave_it(tmp_path):
    assert (
        figures.unit_name(
            read_run_record(write_events(tmp_path / "a", [{"event": "start", "unit": "frames"}]))
        )
        == "frames"
    )
    assert figures.unit_name(read_run_record(write_events(tmp_path / "b", []))) == "tokens"


def test_compilation_that_worked_needs_no_event(tmp_path):
    folder = write_run(tmp_path, FakeRun())
    (folder / "plan.json").write_text(
        json.dumps({"choices": {"compile": {"value": True, "reason": "--compile"}}})
    )
    assert figures.compiled(read_run_record(folder))
    write_events(folder, [{"event": "compile", "status": "failed"}])
    assert not figures.compiled(read_run_record(folder))
