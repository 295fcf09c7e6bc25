"""Tests that pages show hostile names, reasons, devices and metrics as plain text."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.fakes.fake_run import write_run
from harness.fakes.fake_sweep import FakeSweep, write_record
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.report.draw.html import esc
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.page import page
from orchestrator.report.sweep.page import sweep_page

EVIL = '</td></style></script></svg><script>alert(1)</script><img src=x onerror=alert(1)>"\' onload=alert(1) x="\x1b[31m\u202e\x00'  # noqa: E501
KEYS = (
    "task",
    "device",
    "precision",
    "strategy",
    "unit",
    "name",
    "node",
    "message",
    "reason",
    "kind",
    "status",
    "method",
    "sentence",
    "detail",
    "layer_name",
)


class Tags(HTMLParser):
    """Parser that counts scripts, event handlers and foreign addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers = 0
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += sum(name.startswith("on") for name, _ in attrs)
        self.addresses += [
            str(value)
            for name, value in attrs
            if name in ("src", "href") and not str(value).startswith(("data:", "#"))
        ]


def assert_harmless(text: str) -> None:
    tags = Tags(text)
    assert (tags.scripts, tags.handlers, tags.addresses) == (1, 0, [])
    assert not set("\x1b\u202e\x00") & set(text)
    assert "&lt;script&gt;alert(1)" in text  # shown as it is


def poisoned(value: Any) -> Any:
    """Replace every text of an event but its kind, and every name of a metric or a phase, by markup."""
    if isinstance(value, dict):
        named = {"metrics", "seconds", "memory", "host"}
        result: dict[Any, Any] = {}
        for key, item in value.items():
            if key in named and isinstance(item, dict):
                result[key] = {EVIL + name: inner for name, inner in item.items()} | item
            elif key in KEYS and isinstance(item, str):
                result[key] = EVIL
            else:
                result[key] = poisoned(item)
        return result
    return [poisoned(item) for item in value] if isinstance(value, list) else value


RUNS = {
    "one device": FakeRun(
        name=EVIL, warnings=(EVIL,), gpu=True, experts=4, steps=40, ooms=1, compiled="compiled"
    ),
    "failed": FakeRun(name=EVIL, steps=0, ends="failed"),
    "hosts": FakeRun(name=EVIL, hosted=True, workers=3, experts=5, layers=2, steps=40),
    "evolving": replace(EVOLVING_HOSTS, name=EVIL),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_of_a_run_is_harmless(tmp_path: Path, name: str) -> None:
    recorded = evolving_events(RUNS[name]) if name == "evolving" else run_events(RUNS[name])
    events: list[Event] = [{**poisoned(event), "event": event["event"]} for event in recorded]
    folder = write_run(tmp_path / "run", RUNS[name])
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events), encoding="utf-8"
    )
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["choices"][EVIL] = {"value": EVIL, "reason": EVIL, "rejected": [{"option": EVIL, "why": EVIL}]}
    plan["hardware"] = {"gpus": [{"name": EVIL}], "cpu_name": EVIL, "versions": {EVIL: EVIL}}
    plan["settings"] = [{"name": EVIL, "value": EVIL, "origin": EVIL}]
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert_harmless(page(read_run_record(folder)))


def test_the_page_of_a_sweep_is_harmless(tmp_path: Path) -> None:
    sweep = FakeSweep(
        space={"precision": (EVIL, "bf16"), "batch_size": (16, 64), EVIL: (1, 2)},
        failing=(2, 3),
        reason=EVIL,
        device_name=EVIL,
        task=EVIL,
        settings={EVIL: EVIL},
    )
    assert_harmless(sweep_page(write_record(tmp_path, sweep)))


def test_invisible_characters_are_shown_as_a_mark() -> None:
    assert esc("a\x00b\u202ec\x1bd") == "a\ufffdb\ufffdc\ufffdd"
    assert esc("ä\u2009ö\n") == "ä\u2009ö\n"
