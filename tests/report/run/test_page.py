"""Tests of the page of a run: complete, safe, small."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record, write_events, write_run
from orchestrator.errors import UserError
from orchestrator.report.draw.html import JS
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.page import draw_report, page

EVIL = "</script><script>alert(1)</script><img src=//evil.example onerror=alert(1)>\"'&"
VOID = {"meta", "link", "img", "input", "br", "path"}
RUNS = {
    "dense": FakeRun(),
    "moe": FakeRun(gpu=True, experts=8, steps=60, ooms=1, compiled="compiled"),
    "none": FakeRun(steps=0, ends="failed"),
    "one": FakeRun(steps=1, epochs=1, experts=2),
    "killed": FakeRun(ends="killed"),
    "resumed": FakeRun(resume_at=77),
    "broken": FakeRun(broken={5: "nan", 9: "inf"}),
    "hostile": FakeRun(name=EVIL, warnings=(EVIL,)),
    "hosted": FakeRun(hosted=True, workers=3, experts=5, layers=2),
    "hosted, large": FakeRun(hosted=True, workers=8, experts=64, layers=24, steps=40),
}


class Checker(HTMLParser):
    """Parser that collects tags and attributes, and fails on one closed in the wrong place."""

    def __init__(self) -> None:
        super().__init__()
        self.open = []
        self.tags = []
        self.attributes = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_complete_and_needs_no_network(tmp_path, name):
    checker = checked(page(run_record(tmp_path, RUNS[name])))
    assert checker.tags.count("script") == 1
    links = [
        value
        for _, attribute, value in checker.attributes
        if attribute in ("src", "href", "srcset", "action", "data")
    ]
    assert all(link.startswith("data:") for link in links)
    assert not [attribute for _, attribute, _ in checker.attributes if attribute.startswith("on")]


def test_the_page_of_evolving_experts_is_complete_and_needs_no_network(tmp_path):
    checker = checked(page(evolving_record(tmp_path)))
    assert checker.tags.count("script") == 1
    assert checker.tags.count("input") == 2, "the slider, and the filter of the settings"
    assert not [attribute for _, attribute, _ in checker.attributes if attribute.startswith("on")]


def test_style_and_script_contain_no_address(tmp_path):
    assert not re.search(r"@import|url\(|https?://", page(events_record(tmp_path, [])))


def test_the_page_runs_its_own_script_only(tmp_path):
    text = page(run_record(tmp_path))
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert f"<script>{JS}</script>" in text
    assert "default-src 'none'" in text


def test_hostile_content_stays_text_everywhere(tmp_path):
    folder = write_run(
        tmp_path, FakeRun(steps=12, experts=2, name=EVIL, warnings=(EVIL,), compiled=EVIL, ends="failed")
    )
    for name, parse, dump in (
        ("config.yaml", yaml.safe_load, yaml.safe_dump),
        ("plan.json", json.loads, json.dumps),
    ):
        (folder / name).write_text(dump(poisoned(parse((folder / name).read_text()))))
    write_events(
        folder, [poisoned(event) for event in run_events(FakeRun(steps=12, experts=2, gpu=True, resume_at=7))]
    )
    checker = checked(page(read_run_record(folder)))
    assert checker.tags.count("script") == 1
    assert checker.tags.count("img") == 5, "one per layer, and the key of the colours"


def poisoned(value: Any) -> Any:
    """Replace every text but the kind of an event, and every name of a metric, by markup."""
    if isinstance(value, dict):
        mapping = {key: item if key == "event" else poisoned(item) for key, item in value.items()}
        return mapping | {"metrics": {EVIL: 0.5}} if "metrics" in value else mapping
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return EVIL if isinstance(value, str) else value


def test_sections_without_data_are_left_out(tmp_path):
    text = page(run_record(tmp_path / "a", RUNS["none"]))
    assert "Use of the experts" not in text
    assert "<h2>Training" not in text
    assert "batch has 3 channels" in text
    bare = page(events_record(tmp_path / "b", run_events(FakeRun(steps=12))))
    assert "Plan and settings" not in bare
    assert "<h2>Training" in bare


def test_a_full_run_has_all_sections(tmp_path):
    text = page(run_record(tmp_path, RUNS["moe"]))
    for title in (
        "Training",
        "Use of the experts",
        "Where the time goes",
        "Memory",
        "Device use",
        "What happened",
        "Plan and settings",
    ):
        assert f"<h2>{title}" in text, title


def test_an_expert_parallel_run_has_a_section_on_hosts(tmp_path):
    assert "<h2>Hosts of the experts" in page(run_record(tmp_path / "a", RUNS["hosted"]))
    assert "Hosts of the experts" not in page(run_record(tmp_path / "b", RUNS["moe"]))


def test_the_report_is_drawn_from_the_folder_alone(tmp_path):
    write_run(tmp_path, FakeRun(steps=20, epochs=1, experts=2))
    before = {path.name for path in tmp_path.iterdir()}
    written = draw_report(tmp_path)
    names = ["training_metrics.png", "expert_activations.png", "performance_summary.txt", "report.html"]
    assert [path.name for path in written] == names
    assert {path.name for path in tmp_path.iterdir()} == before | set(names), "no partial file is left"
    assert draw_report(tmp_path) == written


def test_the_same_folder_gives_the_same_page(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=20, epochs=1))
    assert page(record) == page(read_run_record(tmp_path))


def test_a_folder_without_a_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no events\.jsonl"):
        draw_report(tmp_path)


@pytest.mark.extended
def test_a_long_run_stays_a_small_page(tmp_path):
    text = page(
        run_record(tmp_path, FakeRun(steps=20_000, epochs=100, experts=16, layers=6, hosted=True, workers=4))
    )
    assert len(text) < 1_000_000
