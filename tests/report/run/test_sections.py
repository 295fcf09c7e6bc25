"""Tests of the sections of the page."""

import pytest

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_run import events_record, run_record, write_events
from orchestrator.record.files.reading import read_events
from orchestrator.report.run import sections
from orchestrator.report.run.figures.read import read_run_record


def record_of(tmp_path, **fields):
    return run_record(tmp_path, FakeRun(**fields))


def test_the_header_has_the_main_facts(tmp_path):
    text = sections.header(record_of(tmp_path, gpu=True, experts=4, name="first"))
    for fact in ("<h1>first</h1>", "t-good", "completed", "NVIDIA H200 · cuda:0", "bf16", "8.4M"):
        assert fact in text, fact


@pytest.mark.parametrize(
    ("ends", "tone"), [("completed", "good"), ("stopped", "info"), ("failed", "bad"), ("killed", "warn")]
)
def test_the_badge_has_a_tone_per_outcome(tmp_path, ends, tone):
    assert f'class="badge t-{tone}"' in sections.header(record_of(tmp_path, ends=ends))


def test_failures_and_missing_ends_are_noted(tmp_path):
    assert "batch has 3 channels" in sections.notes(record_of(tmp_path / "a", ends="failed"))
    assert "still running" in sections.notes(record_of(tmp_path / "b", ends="killed"))
    assert "first at step 9" in sections.notes(record_of(tmp_path / "c", broken={9: "nan"}))
    assert sections.notes(record_of(tmp_path / "d")) == ""


def test_a_recovered_failure_is_a_tile_and_no_note(tmp_path):
    record = record_of(tmp_path, workers=2, recover_at=77)
    assert sections.notes(record) == ""
    assert ">recoveries<" in sections.tiles(record)
    assert "12.3 s each, 17 steps repeated" in sections.tiles(record)
    assert "<span>workers</span>2, gloo, on 1 node" in sections.header(record)
    assert "<span>workers</span>" not in sections.header(record_of(tmp_path / "one"))


def test_a_full_run_has_all_tiles(tmp_path):
    text = sections.tiles(record_of(tmp_path, gpu=True, experts=4))
    for label in (
        "validation accuracy",
        "best accuracy",
        "train loss",
        "samples / s",
        "tokens/s",
        "peak memory",
    ):
        assert label in text, label
    assert "31.2<i> GiB</i>" in text


def test_without_metrics_the_loss_is_shown(tmp_path):
    write_events(tmp_path, [{"event": "evaluate", "step": 3, "loss": "inf"}])
    text = sections.tiles(read_run_record(tmp_path))
    assert "validation loss" in text
    assert "<b>inf</b>" in text


def test_flags_in_the_verdict_are_set_as_code(tmp_path):
    text = sections.verdict_cards(record_of(tmp_path, ooms=1))
    assert '<code class="flag">--activation-checkpointing on</code>' in text
    assert "bound by memory" in text
    uneven = sections.verdict_cards(
        record_of(tmp_path / "b", workers=2, experts=5, hosted=True, skew=0.0, method="round_robin")
    )
    assert '<code class="flag">--placement auto</code>' in uneven


def test_estimate_and_measurement_share_a_scale(tmp_path):
    text = sections.memory_section(record_of(tmp_path, gpu=True))
    assert "estimated" in text
    assert 'width:100.00%" title="reserved"' in text
    assert "the run may use 125.1 GiB" in text


def test_each_part_of_the_memory_has_a_pair_of_bars(tmp_path):
    text = sections.memory_section(record_of(tmp_path, gpu=True, experts=4, workers=2))
    assert text.count(', estimated"></i>') == text.count(', measured"></i>') == 6
    assert "worker 1, whose peak is the largest" in text
    assert 'width:100.00%" title="activations, measured"></i>' in text, "the activations are the largest part"
    on_cpu = sections.memory_section(record_of(tmp_path / "cpu"))
    assert "<span>–</span>" in on_cpu, "no rest of a process was measured"
    assert "whose peak" not in on_cpu


def test_an_estimate_without_a_measurement_has_single_bars(tmp_path):
    record = record_of(tmp_path, steps=2, epochs=1, ends="killed")
    lines = read_events(record.folder / "events.jsonl")
    events = [event for event in lines if event["event"] not in ("epoch", "end")]
    write_events(tmp_path, events)
    text = sections.memory_section(read_run_record(tmp_path))
    assert ', measured"></i>' not in text
    assert text.count(', estimated"></i>') >= 4


def test_experts_have_a_card_per_layer(tmp_path):
    text = sections.experts_section(record_of(tmp_path, experts=8, layers=3))
    assert text.count("<figure") == 3
    assert "3 layers of 8 experts, 12.5% of a layer" in text


@pytest.mark.parametrize(
    "name",
    [
        "training_section",
        "experts_section",
        "time_section",
        "memory_section",
        "device_section",
        "notes",
        "tiles",
    ],
)
def test_a_section_without_data_is_left_out(tmp_path, name):
    record = events_record(tmp_path, [{"event": "end", "status": "completed"}])
    assert getattr(sections, name)(record) == ""
