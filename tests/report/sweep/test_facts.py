"""Tests of the texts about a sweep: settings, values, commands."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.fake_sweep import EVIL, HOSTILE, MIXED, SINGLE, FakeSweep, write_record
from orchestrator.config.reading.flags import read_flags
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.facts import (
    edge_text,
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
from orchestrator.sweeps import outcome_lines


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


def record_of(best: dict[str, object], *others: dict[str, object], search: str = "grid") -> SweepRecord:
    """Return a sweep whose first trial is the best."""
    points = [best, *others]
    rows = [
        TrialRow(number, point, "completed", samples_per_second=1000.0 / number, interval=0.01, workers=1)
        for number, point in enumerate(points, 1)
    ]
    header = {"event": "sweep", "task": "digits", "search": search, "space": dict.fromkeys(best, "")}
    return SweepRecord(Path("sweep"), header, tuple(rows))


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        ((0.1, 0.01, 0.001), "learning rate 0.1 is the largest that was tried"),
        ((0.001, 0.01, 0.1), "learning rate 0.001 is the smallest that was tried"),
        ((0.01, 0.001, 0.1), ""),
        ((0.01, [0.1], 0.001), ""),
    ],
)
def test_a_winner_at_the_edge_of_the_grid_has_a_remark(values: tuple[object, ...], remark: str) -> None:
    """The same in the terminal, on the page and in the text."""
    record = record_of(*({"learning_rate": value} for value in values))
    assert edge_text(record).startswith(f"at the edge of the grid: {remark};" if remark else "")
    assert bool(edge_text(record)) == bool(remark)
    shown = (" ".join(outcome_lines(record)), sweep_page(record), scaling_md(record))
    assert [remark in text and bool(remark) for text in shown] == [bool(remark)] * 3
    drawn = record_of(*({"learning_rate": value} for value in values), search="random")
    assert edge_text(drawn) == ""


@pytest.mark.parametrize(
    ("best", "other"),
    [
        ({"workers": 8}, {"workers": 1}),
        ({"accumulation_steps": 1}, {"accumulation_steps": 4}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.1}),
        ({"precision": "bf16"}, {"precision": "fp32"}),
        ({"static_graph": True}, {"static_graph": False}),
    ],
)
def test_an_edge_beyond_which_there_is_nothing_has_no_remark(best, other) -> None:
    assert edge_text(record_of(best, other)) == ""


def test_values_that_failed_were_tried() -> None:
    record = record_of({"batch_size": 64}, {"batch_size": 16}, {"batch_size": 256})
    failed = replace(record.rows[2], status="out_of_memory", samples_per_second=None)
    assert edge_text(replace(record, rows=(*record.rows[:2], failed))) == ""


def test_a_sweep_with_failed_trials_is_not_completed_in_green() -> None:
    record = record_of({"batch_size": 64}, {"batch_size": 16}, {"batch_size": 256})
    assert '<span class="badge t-good">completed</span>' in sweep_page(record)
    failed = replace(record.rows[2], status="failed", samples_per_second=None, retries=2)
    record = replace(record, rows=(*record.rows[:2], failed))
    page = sweep_page(record)
    assert '<span class="badge t-warn">ended, 1 of 3 trials failed</span>' in page
    counts = "2 completed, 1 failed, 1 tried again after a process was lost"
    assert counts in page
    assert f"3 trials ({counts}); the best is number 1" in outcome_lines(record)[0]
