"""Tests of a frame as text: recorded runs at 80 and 200 columns, and the limits of width and height."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from harness.fakes.fake_events import START_TIME, FakeRun, run_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import decoded
from orchestrator.live.watch.frame import Size, frame
from orchestrator.live.watch.lines import bar, curve, plain
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.live.state import RunState

FRAMES = Path(__file__).parent / "frames"
HOSTED = FakeRun(
    experts=24, layers=4, workers=3, hosted=True, gpu=True, recover_at=70, speeds=(1.0, 0.6), ends="killed"
)
RUNS = {
    "hosts_80": (HOSTED, 80),
    "hosts_200": (HOSTED, 200),
    "failed_80": (FakeRun(workers=2, recover_at=70, ends="failed"), 80),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def drawn(events: list[Event], size: Size, now: float = START_TIME + 30) -> list[str]:
    state = RunState()
    for event in decoded(events):
        state(event)
    return [line.plain for line in frame(state, "run-1", size, now)]


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_drawn_as_this_text(name: str) -> None:
    """The files were read by people. After a change of the view: look at the new text, then store it."""
    run, width = RUNS[name]
    text = "".join(f"{line.rstrip()}\n" for line in drawn(run_events(run), Size(width)))
    assert text == (FRAMES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize("width", [40, 80, 139, 140, 200])
@pytest.mark.parametrize("run", [HOSTED, FakeRun(experts=256, layers=40, workers=64, hosted=True)])
def test_no_line_is_wider_than_the_output(run: FakeRun, width: int) -> None:
    events = [*run_events(run), {"event": "warning", "time": START_TIME, "message": "x" * 500}]
    assert max(cell_len(line) for line in drawn(events, Size(width))) <= width


def test_a_low_terminal_gets_fewer_rows() -> None:
    events = run_events(FakeRun(experts=64, layers=40, workers=32, hosted=True, gpu=True))
    high = drawn(events, Size(200, 60))
    low = drawn(events, Size(200, 30))
    assert len(low) < len(high) <= 60
    assert any("more layers" in line for line in low)
    assert any("more hosts" in line for line in low)


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("height", [20, 24, 30, 40, 60])
def test_a_frame_fits_the_terminal_and_keeps_its_events(width: int, height: int) -> None:
    for run in (HOSTED, FakeRun(experts=64, layers=40, workers=32, hosted=True, gpu=True)):
        lines = drawn(run_events(run), Size(width, height))
        assert len(lines) <= height
        assert "saved step_00000120" in lines[-1] or "completed" in lines[-1]


def test_a_low_terminal_keeps_hosts_before_experts_and_experts_before_phases() -> None:
    kept = {
        height: [
            name for name in ("hosts ", "experts ", "a step") if any(line.startswith(name) for line in lines)
        ]
        for height in (16, 24, 30, 40)
        if (lines := drawn(run_events(HOSTED), Size(80, height)))
    }
    assert kept == {16: [], 24: ["hosts "], 30: ["hosts ", "experts "], 40: ["hosts ", "experts ", "a step"]}


def test_the_slowest_hosts_and_the_most_uneven_layers_are_shown() -> None:
    events = run_events(FakeRun(experts=64, layers=40, workers=32, hosted=True))
    lines = drawn(events, Size(80))
    ratios = [float(line.split("×")[0].split()[-1]) for line in lines if line.startswith("  host ")]
    (rest,) = (line for line in lines if "more hosts" in line)
    assert min(ratios) >= float(rest.split("at most ")[1].removesuffix("×"))
    assert len(ratios) == 16


def test_a_run_without_events_says_so() -> None:
    assert drawn([], Size(80))[-1].startswith("no events yet")


def test_a_silent_run_says_for_how_long() -> None:
    events = run_events(FakeRun(ends="killed"))
    last = events[-1]["time"]
    assert drawn(events, Size(80), last + 10)[0].endswith(" running")
    assert drawn(events, Size(80), last + 600)[0].endswith("running, no event for 10m 00s")


def test_names_and_messages_cannot_control_the_terminal() -> None:
    message = "\x1b[2J\x07 [bold]x[/bold]"
    events: list[Event] = [
        *run_events(FakeRun(ends="killed")),
        {"event": "warning", "time": START_TIME, "message": message},
    ]
    text = "\n".join(drawn(events, Size(80)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text


def test_changes_of_experts_are_counted_and_listed() -> None:
    change = expert_event(100, "born", ids=[24], parents=[3], hosts=[[1]], experts=25)
    lines = drawn([*run_events(HOSTED), {**change, "time": START_TIME}], Size(80))
    assert any("experts 1 born" in line for line in lines)
    assert any("layer 0: expert 24 born from 3" in line for line in lines)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("value", [None, "x", -1, 2**70, float("nan"), [], {}, [[]], [{}], 1e308])
def test_damaged_events_are_drawn_without_an_error(value: Any) -> None:
    events = run_events(HOSTED)
    newest = {event["event"]: event for event in events}
    for event in newest.values():
        for name in event.keys() - {"event"}:
            drawn([*events, {**event, name: value}], Size(80))


def test_a_bar_is_full_by_its_share() -> None:
    assert bar(0.5, 4) == "██░░"
    assert bar(7.0, 2) == "██"
    assert bar(-1.0, 2) == "░░"


def test_a_curve_has_the_highest_and_the_lowest_level() -> None:
    assert curve([4.0, 2.0, 1.0]) == "█▅▁"
    assert curve([1.0, 1.0]) == "▁▁"
    assert curve([]) == ""


def test_the_plain_form_has_the_same_width_and_is_ascii() -> None:
    text = "█░│▁▂▃▄▅▆▇▒▓·×–→…★"
    assert len(plain(text)) == len(text)
    assert plain(text).isascii()
