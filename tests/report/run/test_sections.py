import pytest

from orchestrator.report.run import sections
from orchestrator.report.run.read import read_run_record
from tests.support.fake_run import FakeRun, write_events, write_run


def record_of(tmp_path, **fields):
    return read_run_record(write_run(tmp_path, FakeRun(**fields)))


def test_the_header_places_a_run(tmp_path):
    text = sections.header(record_of(tmp_path, gpu=True, experts=4, name="first"))
    for said in ("<h1>first</h1>", "t-good", "completed", "NVIDIA H200 · cuda:0", "bf16", "8.4M"):
        assert said in text, said


@pytest.mark.parametrize(
    ("ends", "tone"), [("completed", "good"), ("stopped", "info"), ("failed", "bad"), ("killed", "warn")]
)
def test_the_badge_has_a_tone_per_outcome(tmp_path, ends, tone):
    assert f'class="badge t-{tone}"' in sections.header(record_of(tmp_path, ends=ends))


def test_nobody_overlooks_a_failure(tmp_path):
    assert "batch has 3 channels" in sections.notes(record_of(tmp_path / "a", ends="failed"))
    assert "still running" in sections.notes(record_of(tmp_path / "b", ends="killed"))
    assert "first at step 9" in sections.notes(record_of(tmp_path / "c", broken={9: "nan"}))
    assert sections.notes(record_of(tmp_path / "d")) == ""


def test_a_failure_that_was_recovered_from_is_a_tile_and_no_alarm(tmp_path):
    record = record_of(tmp_path, workers=2, recover_at=77)
    assert sections.notes(record) == ""
    assert ">recoveries<" in sections.tiles(record)
    assert "12.3 s each, 17 steps repeated" in sections.tiles(record)
    assert "<span>workers</span>2, gloo, on 1 node" in sections.header(record)
    assert "<span>workers</span>" not in sections.header(record_of(tmp_path / "one"))


def test_the_tiles_of_a_full_run(tmp_path):
    text = sections.tiles(record_of(tmp_path, gpu=True, experts=4))
    for label in (
        "validation accuracy",
        "best accuracy",
        "train loss",
        "samples / s",
        "tokens/s",
        "peak memory",
        ">time<",
    ):
        assert label in text, label
    assert "31.2<i> GiB</i>" in text


def test_the_loss_is_shown_where_there_is_no_metric(tmp_path):
    write_events(tmp_path, [{"event": "evaluate", "step": 3, "loss": "inf"}])
    text = sections.tiles(read_run_record(tmp_path))
    assert "validation loss" in text
    assert "<b>inf</b>" in text


def test_flags_in_the_verdict_are_set_as_code(tmp_path):
    text = sections.verdict_box(record_of(tmp_path, ooms=1))
    assert '<code class="flag">--activation-checkpointing on</code>' in text
    assert "bound by memory" in text
    uneven = sections.verdict_box(
        record_of(tmp_path / "b", workers=2, experts=5, hosted=True, skew=0.0, method="round_robin")
    )
    assert '<code class="flag">--placement auto</code>' in uneven


def test_estimate_and_measure_share_a_scale(tmp_path):
    text = sections.memory_bars(record_of(tmp_path, gpu=True))
    assert "estimated" in text
    assert 'width:100.00%" title="reserved"' in text
    assert "the run may use 125.1 GiB" in text


def test_experts_have_a_card_per_layer(tmp_path):
    text = sections.experts(record_of(tmp_path, experts=8, layers=3))
    assert text.count("<figure") == 3
    assert "3 layers of 8 experts, 12.5% of a layer" in text


@pytest.mark.parametrize(
    "part", ["curves", "experts", "time_spent", "memory_bars", "device", "notes", "tiles"]
)
def test_a_part_without_data_is_not_there(tmp_path, part):
    record = read_run_record(write_events(tmp_path, [{"event": "end", "status": "completed"}]))
    assert getattr(sections, part)(record) == ""
