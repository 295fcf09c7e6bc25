"""Tests of the page's section on experts that change."""

import re
from dataclasses import replace

import pytest

from harness.fakes.fake_evolution import EVOLVING, EVOLVING_HOSTS, evolving_events, evolving_record
from harness.fakes.fake_placements import expert_event
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run import evolution_section as module
from orchestrator.report.run.evolution_section import evolution_section
from orchestrator.report.run.page import page

EVIL = "</svg></script><script>alert(1)</script>\"'&"


def frames(text):
    """Return the frames of each layer's drawing."""
    drawings = re.findall(r'<svg class="experts" .*?</svg>', text, re.DOTALL)
    return [re.findall(r'<g class="frame( now)?" data-text="([^"]*)"', drawing) for drawing in drawings]


def test_each_layer_has_a_frame_per_graph_and_shows_the_last(tmp_path):
    first, second = frames(evolution_section(evolving_record(tmp_path)))
    assert [text for _, text in first] == [
        "step 30, epoch 1, 5 + 4 experts",
        "step 50, epoch 2, 4 + 4 experts",
        "step 60, epoch 2, 4 + 5 experts",
        "step 80, epoch 3, 3 + 5 experts",
        "step 90, epoch 3, 3 + 5 experts",
        "step 120, epoch 4, 3 + 5 experts",
    ]
    assert [bool(now) for now, _ in first] == [False] * 5 + [True]
    assert first == second


def test_the_slider_goes_over_all_frames(tmp_path):
    text = evolution_section(evolving_record(tmp_path))
    assert '<input type="range" min="0" max="5" value="5"' in text
    assert "<output>step 120, epoch 4, 3 + 5 experts</output>" in text


def test_shapes_have_titles_with_figures(tmp_path):
    text = evolution_section(evolving_record(tmp_path, EVOLVING_HOSTS))
    titles = re.findall(r"<title>(.*?)</title>", text)
    assert any(re.match(r"expert 2: [\d.]+% of the choices \([\d.]+ times", title) for title in titles)
    assert any("chosen together by" in title for title in titles)
    assert "expert 0 is gone since the graph before" in titles


def test_every_change_has_step_reason_and_effect(tmp_path):
    text = evolution_section(evolving_record(tmp_path, EVOLVING_HOSTS))
    rows = re.findall(r"<li .*?</li>", text)
    assert len(rows) == 9
    kinds = re.findall(r"<em>(.*?)</em>", text)
    assert kinds == ["born", "warmed", "merged", "born", "born", "undone", "pruned", "moved", "copied"]
    assert "<span>step 20</span><span>layer 0</span>" in rows[0]
    assert "expert 4 born from 1: gate entropy 1.31 of at most 1.39 for 20 steps" in rows[0]
    assert "loss 0.52 → 0.516, output changed by 3.2e-07, 5 experts in the layer" in rows[0]
    assert "more than the tolerance" in rows[5]
    assert "loss" not in rows[7], "nobody measured the loss of a move"


def test_the_heading_counts_the_changes(tmp_path):
    text = evolution_section(evolving_record(tmp_path))
    assert "2 born, 1 warmed, 1 merged, 1 pruned, 1 undone" in text
    graphs = [event for event in evolving_events() if event["event"] == "expert_graph"]
    assert "no change so far" in evolution_section(events_record(tmp_path / "b", graphs))


def test_long_runs_show_some_graphs_and_the_last_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FRAMES", 3)
    monkeypatch.setattr(module, "MAX_CHANGES", 2)
    text = evolution_section(evolving_record(tmp_path))
    labels = [label for _, label in frames(text)[0]]
    assert [label.partition(",")[0] for label in labels] == ["step 30", "step 60", "step 120"]
    assert len(re.findall(r"<li ", text)) == 2
    assert "5 earlier changes are in events.jsonl" in text


def test_the_number_of_shapes_is_limited(tmp_path, monkeypatch):
    record = evolving_record(tmp_path)
    monkeypatch.setattr(module, "MAX_SHAPES", 60)
    assert len(frames(evolution_section(record))[0]) == 2


def test_a_part_of_many_layers_is_noted(tmp_path):
    text = evolution_section(evolving_record(tmp_path, replace(EVOLVING, layers=8)))
    assert len(frames(text)) == 6
    assert "6 of 8 layers are shown, those with the most changes" in text


def test_without_evolution_there_is_no_section(tmp_path):
    assert evolution_section(run_record(tmp_path)) == ""
    assert "<h2>Experts<" not in page(run_record(tmp_path))
    assert "<h2>Experts<" in page(evolving_record(tmp_path))


def test_changes_without_graphs_are_shown(tmp_path):
    text = evolution_section(events_record(tmp_path, [expert_event(20, "pruned", [1])]))
    assert "expert 1 pruned" in text
    assert "<svg" not in text


@pytest.mark.parametrize("layers", [[], "x", [{"layer": 0, "experts": [{"id": 0}]}]])
def test_odd_graphs_are_harmless(tmp_path, layers):
    event = {"event": "expert_graph", "step": 1, "epoch": 0, "layers": layers}
    evolution_section(events_record(tmp_path, [event, event | {"step": 2, "layers": []}]))


def test_markup_stays_text(tmp_path):
    events = [
        expert_event(20, "born", [4], reason=EVIL, layer_name=EVIL),
        {
            "event": "expert_graph",
            "step": 30,
            "epoch": 0,
            "layers": [{"layer": 0, "name": EVIL, "experts": [{"id": 0, "share": EVIL, "hosts": [EVIL]}]}],
        },
    ]
    assert "<script" not in evolution_section(events_record(tmp_path, events))
