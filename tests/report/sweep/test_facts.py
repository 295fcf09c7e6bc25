"""Tests of the texts about a sweep: settings, values, commands."""

import shlex
from dataclasses import replace

import pytest

from orchestrator.config.flags import read_flags
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.facts import (
    name_text,
    objective_name,
    sentence,
    short_value,
    swept_settings,
    ties_text,
    train_command,
)
from orchestrator.report.sweep.markdown import scaling_md
from orchestrator.report.sweep.page import sweep_page
from tests.support.fakes.fake_sweep import EVIL, HOSTILE, MIXED, SINGLE, FakeSweep, write_record


def test_the_command_trains_with_the_trial(tmp_path) -> None:
    from orchestrator.cli.train import TrainOptions

    space = {"static_graph": (True, False), "batch_size": (16,)}
    settings = {"epochs": 3, "data_dir": "a b;c"}
    record = write_record(tmp_path, FakeSweep(space=space, settings=settings))
    words = shlex.split(train_command(record, record.rows[0]))
    assert words[:2] == ["orchestrator", "train"]
    _, resolved = read_flags(TrainOptions, words[2:], "orchestrator train")
    config = resolved.config
    assert (config.task, config.run.epochs, str(config.data.data_dir)) == ("digits", 3, "a b;c")
    assert (config.parallel.static_graph, config.batch.batch_size, config.parallel.workers) == (True, 16, 1)
    assert "--no-static-graph" in train_command(record, record.rows[1])


def test_the_point_overrides_the_settings_of_the_sweep(tmp_path) -> None:
    settings = {"batch_size": 8, "task": "other", "no_setting": 1}
    record = write_record(tmp_path, FakeSweep(space={"batch_size": (16,)}, settings=settings))
    command = train_command(record, record.rows[0])
    assert command == "orchestrator train --task digits --batch-size 16 --workers 1"


def test_a_hostile_setting_is_one_word_of_the_shell(tmp_path) -> None:
    record = write_record(tmp_path, HOSTILE)
    words = shlex.split(train_command(record, record.rows[0]))
    assert words.count(EVIL) == 2, "task and data_dir"


def test_a_damaged_header_still_gives_texts(tmp_path) -> None:
    header = {"event": "sweep", "space": 3, "settings": [1], "trials": "x", "devices": None}
    record = SweepRecord(tmp_path, header, (TrialRow(1, {}, "failed"),))
    assert "1 trial: 1 failed" in sentence(record)
    assert train_command(record, record.rows[0]) == "orchestrator train --task digits"


def test_swept_settings_have_two_values_or_more(tmp_path) -> None:
    assert swept_settings(write_record(tmp_path / "a", SINGLE)) == ["batch_size"]
    two = FakeSweep(space={"batch_size": (16,), "compile": ("on", "off")})
    assert swept_settings(write_record(tmp_path / "b", two)) == ["compile"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "on"),
        (0.00012345678, "0.0001235"),
        ([1, 2], "1,2"),
        ("data_parallel", "data parallel"),
        ("x" * 100, "x" * 39 + "…"),
    ],
)
def test_values_are_short(value, text) -> None:
    assert short_value(value) == text


def test_names_of_settings_are_short() -> None:
    assert name_text("accumulation_steps") == "accumulation"
    assert name_text("learning_rate") == "learning rate"


def test_listed_points_are_not_described_as_a_product(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    assert "swept precision (fp32,bf16) × batch (16,64,256)" in sentence(record)
    points = [dict(row.point) for row in record.rows]
    listed = replace(record, header=dict(record.header) | {"points": points})
    text = "swept 36 listed points of precision, batch, accumulation, devices by grid search"
    assert text in sentence(listed)


def test_a_python_task_is_trained_by_a_line_of_python(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(task="python:Net"))
    best = record.best()
    assert best is not None
    settings = ", ".join(f"{name}={value!r}" for name, value in {"epochs": 3, **best.point}.items())
    assert train_command(record, best) == f"Trainer(…, config=Config.of({settings})).fit()"
    for text in (scaling_md(record), sweep_page(record)):
        assert "--tuned" not in text
        assert "Trainer(…, config=Config.of(" in text


def test_a_tie_is_told_on_the_page(tmp_path) -> None:
    rows = tuple(
        TrialRow(number, {"batch_size": number}, "completed", samples_per_second=speed, interval=interval)
        for number, speed, interval in ((1, 1309.0, 0.17), (2, 978.0, 0.27))
    )
    record = SweepRecord(tmp_path, {"event": "sweep", "objective": "throughput"}, rows)
    assert ties_text(record).startswith("a tie: the intervals of trial 1")
    assert "A tie: the intervals of trial 1" in sweep_page(record)
    assert ties_text(replace(record, rows=rows[:1])) == ""


def test_the_page_shows_the_metric_that_is_the_objective(tmp_path) -> None:
    rows = tuple(
        TrialRow(number, {"batch_size": number}, "completed", samples_per_second=9.0, metrics={"mae": mae})
        for number, mae in ((1, 0.75), (2, 0.25))
    )
    record = SweepRecord(tmp_path, {"event": "sweep", "objective": "mae:min"}, rows)
    page = sweep_page(record)
    assert "best mae" in page
    assert "0.25" in page
    hostile = replace(record, header={"event": "sweep", "objective": f"{EVIL}$\\frac:min"})
    assert not set('<>$&;\\"') & set(objective_name(hostile))
