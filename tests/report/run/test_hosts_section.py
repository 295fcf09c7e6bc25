"""Tests of the page's section on the experts' hosts."""

import re

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record
from orchestrator.record.summary.summary import summarise
from orchestrator.report.draw.image import png
from orchestrator.report.run.hosts_plot import hosts_picture
from orchestrator.report.run.hosts_section import hosts_section
from orchestrator.report.run.page import page
from orchestrator.report.run.text import performance_summary
from tests.report.run.test_page import EVIL, checked, poisoned

FEW = FakeRun(hosted=True, workers=3, experts=5, layers=2)
MANY = FakeRun(hosted=True, workers=8, experts=64, layers=24, gpu=True, steps=40)


def section_of(tmp_path, run):
    return hosts_section(run_record(tmp_path, run))


def test_each_expert_is_shown_on_its_host(tmp_path):
    text = section_of(tmp_path, FEW)
    for text_part in (
        "Hosts of the experts", "5 experts of 2 layers on 3 hosts (lpt)", "Layer 1",
        "blocks.1.ffn", "predicted 1.41×", "21.3<i> MiB</i>",
        "21,845 rows", "9.6<i> ms</i>", "11% of a step", "host 2", "93.0 GFLOP/s",
        "AMD EPYC 7R13 · cpu", "10.0.0.3", "layer 0: 0, 3",
        "steps 61 to 120",
    ):  # fmt: skip
        assert text_part in text, text_part
    assert text.count("<title>expert ") == 2 * 5
    checked(text)


def test_bars_are_in_proportion(tmp_path):
    paths = re.findall(r'd="M([\d.]+) [\d.]+L([\d.]+)[^>]*/><title>expert (\d)', section_of(tmp_path, FEW))[
        :5
    ]
    widths = {expert: (float(right) - float(left)) / 600 for left, right, expert in paths}
    assert widths == pytest.approx({"4": 1.0, "0": 0.125, "3": 0.5, "1": 0.25, "2": 0.25}, abs=0.001)


def test_a_slow_host_is_highlighted(tmp_path):
    slow = "fill:var(--warm)"
    assert slow in section_of(tmp_path / "a", FEW)
    even = FakeRun(hosted=True, workers=2, experts=4, layers=1, sizes=(64,), skew=0.0)
    assert slow not in section_of(tmp_path / "b", even)


def test_many_layers_give_a_map(tmp_path):
    text = section_of(tmp_path, MANY)
    assert text.count("<img") == 2, "the map, and the key of its colours"
    assert "9 experts per layer" in text
    assert "slowest host of each layer" in text
    assert len(text) < 50_000
    checked(text)


def test_unknown_parts_are_left_out(tmp_path):
    assert section_of(tmp_path / "a", FakeRun(experts=4)) == ""
    events = run_events(FEW)
    exchange_only = hosts_section(
        events_record(tmp_path / "b", [event for event in events if event["event"] != "placement"])
    )
    assert "sent per step" in exchange_only
    assert "<summary>Hosts" not in exchange_only
    without_loads = hosts_section(
        events_record(
            tmp_path / "c", [event for event in events if event["event"] not in ("load", "exchange")]
        )
    )
    assert "sent per step" not in without_loads
    assert ">predicted</span>" in without_loads
    assert "share of the work" in without_loads
    one = FakeRun(hosted=True, workers=1, experts=4)
    assert "<summary>Hosts" not in section_of(tmp_path / "d", one)


@pytest.mark.parametrize("run", [FEW, MANY])
def test_hostile_content_stays_text(tmp_path, run):
    record = events_record(tmp_path, [poisoned(event) for event in run_events(run)])
    checker = checked(page(record))
    assert checker.tags.count("script") == 1
    assert EVIL not in hosts_section(record)
    assert "&lt;script&gt;" in hosts_section(record)
    assert hosts_picture(record) is not None


def changed(**fields):
    """Return the events of a run with other fields in its placements."""
    return [event | fields if event["event"] == "placement" else event for event in run_events(FEW)]


def layers_with(**fields):
    return [
        layer | fields
        for event in run_events(FEW)
        if event["event"] == "placement"
        for layer in event["layers"]
    ]


MALFORMED = {
    "nothing but a name": [{"event": "placement"}, *run_events(FEW)[1:]],
    "no layers": changed(layers=[]),
    "no hosts": changed(hosts=[]),
    "hosts of numbers": changed(hosts=[1, 2, 3]),
    "hosts without fields": changed(hosts=[{}, {}, {}]),
    "hosts of one rank": changed(hosts=[{"rank": 0}, {"rank": 0}]),
    "invalid speeds": changed(hosts=[{"rank": 0, "speed": "fast"}, {"rank": 1, "speed": -3}, {"rank": 2, "speed": "inf"}]),  # noqa: E501
    "layers of numbers": changed(layers=[3, None, "x"]),
    "layers without fields": changed(layers=[{}, {}]),
    "experts past the hosts": changed(layers=layers_with(host_of=[0, 9, -1, "x", None])),
    "no expert placed": changed(layers=layers_with(host_of=[9] * 5)),
    "fewer experts than counted": changed(layers=layers_with(host_of=[0, 1], sizes=[1, 2])),
    "more experts than counted": changed(layers=layers_with(host_of=[0, 1, 2] * 4, sizes=[1] * 12)),
    "invalid sizes": changed(layers=layers_with(sizes=["nan", 0, -1, None, 1e308], costs=None, seconds=None)),
    "seconds of another count": changed(layers=layers_with(seconds=[1.0])),
    "invalid names": changed(layers=layers_with(name=["a"]), sentence=7, method={}),
    "loads of another shape": [event | {"loads": [None, "x", [1]]} if event["event"] == "load" else event for event in run_events(FEW)],  # noqa: E501
    "loads of nothing": [event | {"loads": [[0] * 5] * 2} if event["event"] == "load" else event for event in run_events(FEW)],  # noqa: E501
    "exchange of text": [event | {"bytes": "x", "seconds": [], "rows": None} if "rows" in event else event for event in run_events(FEW)],  # noqa: E501
}  # fmt: skip


@pytest.mark.extended(but_first=6)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_events_are_harmless(tmp_path, name):
    record = events_record(tmp_path, MALFORMED[name])
    checked(page(record))
    figure = hosts_picture(record)
    if figure is not None:
        assert png(figure).startswith(b"\x89PNG")
    assert "verdict" in performance_summary(record)
    assert summarise(record.events)["steps"] == 120


def test_experts_without_a_host_are_shown(tmp_path):
    text = hosts_section(events_record(tmp_path / "a", MALFORMED["experts past the hosts"]))
    assert re.search(r"[\d.]+% of the rows went to experts without a known host", text)
    assert "no expert" in text
    assert "without a known host" not in section_of(tmp_path / "b", FEW)
