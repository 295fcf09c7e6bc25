from orchestrator.report.run.read import read_run_record
from orchestrator.report.run.timeline import MAX_ROWS, happenings, timeline_list
from tests.support.fake_run import FakeRun, write_events, write_run


def kinds(record):
    return [row.kind for row in happenings(record)]


def test_what_happened_in_order(tmp_path):
    run = FakeRun(steps=40, epochs=1, ooms=1, warnings=("hot",), compiled="compiled", ends="failed")
    record = read_run_record(write_run(tmp_path, run))
    assert kinds(record) == ["compilation", "warning", "out of memory", "checkpoint", "failure", "end"]
    rows = {row.kind: row for row in happenings(record)}
    assert rows["out of memory"].text == "micro-batch of 64 did not fit in backward; went on with 32"
    assert rows["checkpoint"].text == "checkpoints/step_00000040 (2.3 MiB, 50 ms)"
    assert rows["end"].tone == "bad"


def test_many_alike_are_told_in_short(tmp_path):
    record = read_run_record(write_run(tmp_path, FakeRun(steps=40, epochs=20)))
    assert [row.text for row in happenings(record)][1] == "… 18 more"
    assert kinds(record) == ["checkpoint"] * 3 + ["end"]


def test_a_resume_tells_what_it_passed_over(tmp_path):
    event = {
        "event": "resume",
        "step": 4,
        "path": "c/4",
        "skipped": [{"path": "c/8", "reason": "hash differs"}],
    }
    (row,) = happenings(read_run_record(write_events(tmp_path, [event])))
    assert row.text == "went on from c/4; passed over c/8: hash differs"


def test_a_run_that_went_on_from_memory_says_so(tmp_path):
    (row,) = happenings(
        read_run_record(
            write_events(tmp_path, [{"event": "resume", "step": 4, "path": None, "source": "memory"}])
        )
    )
    assert row.text == "went on from copies in memory"


def test_a_recovery_is_told_with_its_parts(tmp_path):
    record = read_run_record(write_run(tmp_path, FakeRun(steps=40, epochs=4, workers=3, recover_at=27)))
    rows = {row.kind: row for row in happenings(record)}
    assert rows["failure"].text == "step 27: worker 1 was lost"
    assert rows["failure"].tone == "warn"  # it did not end the run
    assert rows["recovery"].text == (
        "recovered in 12.3 s on 2 workers instead of 3 at step 20, from a checkpoint, 7 steps repeated "
        "(detect 1.23 s, regroup 9.84 s, restore 1.23 s); a worker was lost"
    )
    assert rows["recovery"].step == 20
    assert rows["checkpoint"].text.endswith("(2.3 MiB, 50 ms, 5 ms of it held up the training)")


def test_a_placement_is_told_in_its_own_words(tmp_path):
    record = read_run_record(
        write_run(tmp_path, FakeRun(steps=20, epochs=1, hosted=True, workers=2, experts=3))
    )
    row = happenings(record)[0]
    assert (row.kind, row.tone, row.step) == ("placement", "calm", 0)
    assert row.text.startswith("3 experts of 4 layers on 2 hosts (lpt)")
    assert happenings(read_run_record(write_events(tmp_path / "b", [{"event": "placement"}])))[0].text == ""


def test_no_more_rows_than_a_page_bears(tmp_path):
    events = [{"event": ("warning", "resume")[index % 2], "message": "m"} for index in range(500)]
    assert len(happenings(read_run_record(write_events(tmp_path, events)))) == MAX_ROWS


def test_markup_in_a_message_stays_text(tmp_path):
    text = timeline_list(
        read_run_record(write_events(tmp_path, [{"event": "warning", "message": "<img src=x>"}]))
    )
    assert "&lt;img src=x&gt;" in text
    assert timeline_list(read_run_record(write_events(tmp_path / "none", []))) == ""
