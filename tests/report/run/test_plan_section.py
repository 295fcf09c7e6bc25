"""Tests of the tables of the plan's choices and of the settings."""

import json

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_run import run_record, write_run
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.plan_section import choices_table, settings_table


def with_plan(tmp_path, plan):
    folder = write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (folder / "plan.json").write_text(json.dumps(plan))
    return read_run_record(folder)


def test_choices_have_reasons_and_rejected_options(tmp_path):
    text = choices_table(run_record(tmp_path, FakeRun(steps=2, epochs=1, gpu=True)))
    assert "compute capability 9.0 has bf16 units" in text
    assert "not <code>fp16</code>: needs loss scaling" in text


def test_changed_settings_come_first(tmp_path):
    text = settings_table(run_record(tmp_path, FakeRun(steps=2, epochs=1)))
    assert "9, 3 of them set" in text
    assert text.index("file cfg.yaml:3") < text.index("optim.learning_rate")
    assert "[&quot;tensorboard&quot;]" in text


def test_without_a_plan_there_are_no_tables(tmp_path):
    record = with_plan(tmp_path, {})
    assert choices_table(record) == settings_table(record) == ""


def test_malformed_entries_are_skipped(tmp_path):
    record = with_plan(
        tmp_path,
        {
            "choices": {"a": 3, "b": {"value": "<b>", "rejected": ["x", {"option": "<i>"}]}},
            "settings": ["x", {}],
        },
    )
    assert "&lt;b&gt;" in choices_table(record)
    assert "<i>" not in choices_table(record)
    assert "<tr" in settings_table(record)


def test_choices_without_effect_are_left_out_and_the_table_is_closed(tmp_path):
    """A model without experts needs no seven rows that say so."""
    unused = {"value": "none", "reason": "not used: the model has no experts"}
    given = {"value": 1, "reason": "not used: the model has no experts; 1 instead of --exchange-chunks 4"}
    precision = {"value": "fp32", "reason": "this CPU has no bf16 units"}
    choices = {"precision": precision, "placement": unused, "gate": unused, "exchange_chunks": given}
    text = choices_table(with_plan(tmp_path, {"choices": choices}))
    assert text.startswith('<details class="card"><summary>')
    assert "2, 2 without effect in this run are in plan.json" in text
    assert "placement" not in text
    assert "exchange_chunks" in text
