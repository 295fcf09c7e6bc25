"""Tests of the timeline of a run."""

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.figures.timeline import MAX_ROWS, timeline_list, timeline_rows


def kinds(record):
    return [row.kind for row in timeline_rows(record)]


def test_events_are_in_order(tmp_path):
    run = FakeRun(steps=40, epochs=1, ooms=1, warnings=("hot",), compiled="compiled", ends="failed")
    record = run_record(tmp_path, run)
    assert kinds(record) == ["compilation", "warning", "out of memory", "checkpoint", "failure", "end"]
    rows = {row.kind: row for row in timeline_rows(record)}
    assert rows["out of memory"].text == (
        "out of memory at step 1 (backward) with a micro-batch of 64; continuing with 32"
    )
    assert rows["checkpoint"].text == "saved step_00000040 (2.3 MiB, 50 ms)"
    assert rows["end"].tone == "bad"


def test_a_long_series_is_shortened(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=40, epochs=20))
    assert [row.text for row in timeline_rows(record)][1] == "… 18 more"
    assert kinds(record) == ["checkpoint"] * 3 + ["end"]


def test_a_resume_names_skipped_checkpoints(tmp_path):
    event = {
        "event": "resume",
        "step": 4,
        "path": "c/4",
        "skipped": [{"path": "c/8", "reason": "hash differs"}],
    }
    (row,) = timeline_rows(events_record(tmp_path, [event]))
    assert row.text == "resumed at step 4 from c/4; skipped c/8: hash differs"


def test_a_resume_from_memory_says_so(tmp_path):
    (row,) = timeline_rows(
        events_record(tmp_path, [{"event": "resume", "step": 4, "path": None, "source": "memory"}])
    )
    assert row.text == "resumed at step 4 from snapshots in memory"


def test_a_recovery_is_shown_with_its_parts(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=40, epochs=4, workers=3, recover_at=27))
    rows = {row.kind: row for row in timeline_rows(record)}
    assert rows["failure"].text == "step 27: worker 1 was lost"
    assert rows["failure"].tone == "warn"  # it did not end the run
    assert rows["recovery"].text == (
        "recovered in 12.3 s on 2 workers instead of 3 at step 20, from a checkpoint, 7 steps repeated "
        "(detect 1.23 s, regroup 9.84 s, restore 1.23 s); a worker was lost"
    )
    assert rows["recovery"].step == 20
    assert rows["checkpoint"].text.endswith("(2.3 MiB, 50 ms, training blocked for 5 ms)")


def test_a_placement_is_shown_by_its_sentence(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=20, epochs=1, hosted=True, workers=2, experts=3))
    row = timeline_rows(record)[0]
    assert (row.kind, row.tone, row.step) == ("placement", "calm", 0)
    assert row.text.startswith("3 experts of 4 layers on 2 hosts (lpt)")
    assert timeline_rows(events_record(tmp_path / "b", [{"event": "placement"}]))[0].text == ""


def test_the_number_of_rows_is_limited(tmp_path):
    events = [{"event": ("warning", "resume")[index % 2], "message": "m"} for index in range(500)]
    assert len(timeline_rows(events_record(tmp_path, events))) == MAX_ROWS


def test_markup_in_a_message_stays_text(tmp_path):
    text = timeline_list(events_record(tmp_path, [{"event": "warning", "message": "<img src=x>"}]))
    assert "&lt;img src=x&gt;" in text
    assert timeline_list(events_record(tmp_path / "none", [])) == ""


def test_an_interval_of_snapshots_is_shown_with_its_reason(tmp_path):
    event = {"event": "snapshot_interval", "step": 25, "every": 50, "reason": "2% of the time"}
    (row,) = timeline_rows(events_record(tmp_path / "a", [event]))
    assert (row.kind, row.step, row.text) == ("snapshots", 25, "snapshots every 50 steps: 2% of the time")


def test_changes_of_experts_are_shown(tmp_path):
    record = evolving_record(tmp_path)
    shown = [row.text for row in timeline_rows(record) if row.kind == "experts"]
    assert shown[0].startswith("layer 0: expert 4 born from 1, 5 experts now: gate entropy 1.31")
    assert any("undone" in text for text in shown)
