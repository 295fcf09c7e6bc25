"""Tests of reading a run folder."""

import json
import math

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record, write_events, write_run
from orchestrator.errors import UserError
from orchestrator.record.events.decoding import finite, number
from orchestrator.report.run.figures.read import UNFINISHED, cached_on_record, read_run_record


def test_a_finished_run_is_read(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=20, epochs=2, experts=4))
    assert record.name == "fake"
    assert record.status == "completed"
    assert [event.step for event in record.steps] == list(range(1, 21))
    assert [event.epoch for event in record.epochs] == [0, 1]
    assert [event.step for event in record.evaluations] == [10, 20]
    assert len(record.phases) == len(record.loads) == len(record.monitors) == 2
    assert record.exchanges == []
    assert record.fact("task") == "text"
    assert record.seconds == pytest.approx(record.summary["seconds"])


def test_events_alone_are_enough(tmp_path):
    record = events_record(tmp_path / "bare", run_events(FakeRun(steps=5, epochs=1)))
    assert (record.config, record.plan, record.summary) == ({}, {}, {})
    assert record.name == "bare"
    assert record.status == "completed"
    assert len(record.steps) == 5


def test_a_killed_run_is_unfinished(tmp_path):
    record = run_record(tmp_path, FakeRun(ends="killed"))
    assert record.status == UNFINISHED
    assert record.end is None
    assert record.seconds is not None
    assert record.seconds > 0


def test_a_resumed_run_counts_each_step_once_and_leaves_out_the_pause(tmp_path):
    run = FakeRun(steps=40, epochs=4, resume_at=27)
    record = run_record(tmp_path, run)
    assert [event.step for event in record.steps] == list(range(1, 41))
    assert record.replayed_steps == 7
    assert len(record.sessions) == 2
    assert record.seconds is not None
    assert record.seconds < 60, "without the 300 s between the two processes"


def test_a_recovered_run_is_one_session(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=40, epochs=4, workers=3, recover_at=27))
    assert [event.step for event in record.steps] == list(range(1, 41))
    assert (len(record.sessions), len(record.recoveries), record.replayed_steps, record.workers) == (
        1,
        1,
        7,
        2,
    )
    assert record.resumes == []  # the workers read a checkpoint; no user resumed the run
    assert record.seconds is not None
    assert record.seconds > 12.3
    assert [event.step for event in run_record(tmp_path / "b", FakeRun(resume_at=77)).resumes] == [60]


def test_the_summary_of_an_earlier_session_does_not_count(tmp_path):
    events = run_events(FakeRun(steps=10, epochs=1))
    again = run_events(FakeRun(steps=20, epochs=1, ends="killed"))
    write_run(tmp_path, FakeRun(steps=10, epochs=1))
    write_events(tmp_path, events + again)
    assert read_run_record(tmp_path).status == UNFINISHED


def test_a_torn_last_line_and_events_without_a_step_are_skipped(tmp_path):
    write_run(tmp_path, FakeRun(steps=5, epochs=1, ends="killed"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "loss": 1.0}\n{"event": "step", "step": "six"}\n{"event": "step", "st')
    assert len(read_run_record(tmp_path).steps) == 5


def test_exchanges_are_by_step(tmp_path):
    record = run_record(
        tmp_path, FakeRun(steps=40, epochs=4, hosted=True, workers=2, experts=2, resume_at=27)
    )
    assert [event.step for event in record.exchanges] == [10, 20, 30, 40]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "exchange", "bytes": 1}\n{"event": "exchange", "step": "x"}\n')
    assert len(read_run_record(tmp_path).exchanges) == 4


def test_an_empty_record_is_readable(tmp_path):
    record = events_record(tmp_path, [])
    assert (record.steps, record.sessions, record.end, record.seconds) == ([], [], None, None)
    assert record.status == UNFINISHED
    assert not record.on_gpu


@pytest.mark.parametrize(("gpu", "expected"), [(True, True), (False, False)])
def test_the_device_decides_whether_it_is_a_gpu(tmp_path, gpu, expected):
    assert run_record(tmp_path, FakeRun(steps=5, epochs=1, gpu=gpu)).on_gpu is expected


def test_a_choice_of_the_plan_overrides_the_config(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=5, epochs=1, gpu=True))
    assert record.config["device"]["precision"] == "auto"
    assert record.setting("device", "precision") == "bf16"
    assert record.setting("run", "epochs") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "a: [1"),
        ("config.yaml", "- 1\n"),
        ("plan.json", "{"),
        ("plan.json", "[1]"),
        ("summary.json", '{"a": }'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text):
    write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_run_record(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path):
    write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"plan\.json"):
        read_run_record(tmp_path)


def test_an_empty_config_is_empty(tmp_path):
    write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (tmp_path / "config.yaml").write_text("")
    assert read_run_record(tmp_path).config == {}


def test_yaml_builds_no_objects(tmp_path):
    write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_run_record(tmp_path)


def test_a_folder_without_events_is_refused_with_its_content(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match=r"no events\.jsonl") as caught:
        read_run_record(tmp_path)
    assert "logs/, notes.txt" in str(caught.value)
    assert "--run-dir" in str(caught.value)


def test_a_folder_of_runs_names_them(tmp_path):
    write_run(tmp_path / "first", FakeRun(steps=2, epochs=1))
    with pytest.raises(UserError, match="Runs inside it: first"):
        read_run_record(tmp_path)


def test_a_missing_folder_and_a_file_have_different_messages(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_run_record(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        read_run_record(tmp_path / "file")


def test_non_finite_numbers_come_as_text():
    assert math.isnan(number("nan") or 0)
    assert number("-inf") == -math.inf
    assert [number(value) for value in (None, True, "seven", [], 10**400)] == [None] * 5
    assert finite("inf") is None
    assert finite(3) == 3.0


def test_a_cached_function_is_called_once(tmp_path):
    record = events_record(tmp_path, [])
    calls = []
    function = cached_on_record(lambda record: calls.append(record))
    for _ in range(2):
        function(record)
    assert len(calls) == 1


def test_the_fake_plan_has_the_fields_of_a_real_one(tmp_path):
    plan = json.loads((write_run(tmp_path) / "plan.json").read_text())
    assert plan.keys() == {"choices", "memory", "flops_per_step", "settings", "model", "hardware"}
