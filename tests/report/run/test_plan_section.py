import json

from orchestrator.report.run.plan_section import choices, settings
from orchestrator.report.run.read import read_run_record
from tests.support.fake_run import FakeRun, write_run


def with_plan(tmp_path, plan):
    folder = write_run(tmp_path, FakeRun(steps=2, epochs=1))
    (folder / "plan.json").write_text(json.dumps(plan))
    return read_run_record(folder)


def test_choices_carry_reason_and_what_was_rejected(tmp_path):
    text = choices(read_run_record(write_run(tmp_path, FakeRun(steps=2, epochs=1, gpu=True))))
    assert "compute capability 9.0 has bf16 units" in text
    assert "not <code>fp16</code>: needs loss scaling" in text


def test_settings_somebody_set_come_first(tmp_path):
    text = settings(read_run_record(write_run(tmp_path, FakeRun(steps=2, epochs=1))))
    assert "9, 3 of them set" in text
    assert text.index("file cfg.yaml:3") < text.index("optim.learning_rate")
    assert "[&quot;tensorboard&quot;]" in text


def test_without_a_plan_there_are_no_tables(tmp_path):
    record = with_plan(tmp_path, {})
    assert choices(record) == settings(record) == ""


def test_parts_of_another_shape_are_passed_over(tmp_path):
    record = with_plan(
        tmp_path,
        {
            "choices": {"a": 3, "b": {"value": "<b>", "rejected": ["x", {"option": "<i>"}]}},
            "settings": ["x", {}],
        },
    )
    assert "&lt;b&gt;" in choices(record)
    assert "<i>" not in choices(record)
    assert "<tr" in settings(record)
