"""Tests of the output of a run: its banner, quiet and plain output, odd texts, and no harm to the run."""

import io
from typing import Any

import pytest
from rich.console import Console

from harness.runs.records import made
from harness.runs.screens import END, ESCAPE, EVALUATE, drawn_lines, piped, start, step, terminal
from orchestrator.live.screen.screen import Screen


def test_piped_lines_are_not_wrapped() -> None:
    screen, out = piped(width=40)
    screen.banner([("folder", "/results/" + "x" * 200)], "run")
    screen(made({"event": "resume", "step": 40, "path": "/results/" + "y" * 150, "skipped": []}))
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize("open_screen", [piped, terminal])
def test_text_from_outside_is_neither_markup_nor_control(open_screen: Any) -> None:
    screen, out = open_screen(width=120)
    screen.banner([("[red]task[/red]", "[/oops] [bold]x")], "[link=http://x]title")
    screen(made({"event": "warning", "message": f"[/nope] [blink]a{ESCAPE}[2Jb\nc\rd :smile:"}))
    screen(made({**EVALUATE, "metrics": {"[red]acc": 0.5}}))
    shown = out.getvalue()
    for literal in (
        "[red]task[/red]",
        "[/oops] [bold]x",
        "[link=http://x]title",
        "[/nope] [blink]a",
        "b c d :smile:",
        "[red]acc 0.5",
    ):
        assert literal in shown
    assert f"{ESCAPE}[2J" not in shown


def test_a_long_message_is_cut() -> None:
    screen, out = piped()
    screen(made({"event": "failure", "kind": "task", "message": "x" * 5000}))
    assert len(out.getvalue()) <= 301


def test_the_banner_is_a_panel_on_a_terminal() -> None:
    screen, out = terminal()
    screen.banner([("processes", "4"), ("folder", "results/digits-1")], title="expert-orchestrator 0.1.0")
    lines = drawn_lines(out.getvalue())
    assert lines[0].startswith("╭─ expert-orchestrator 0.1.0 ─")
    assert "processes  4" in lines[1]
    assert all(len(line) <= 80 for line in lines)


def test_the_banner_is_plain_in_a_pipe() -> None:
    screen, out = piped()
    screen.banner([("processes", "4"), ("folder", "results/digits-1")], title="expert-orchestrator 0.1.0")
    assert out.getvalue() == "expert-orchestrator 0.1.0\n  processes  4\n  folder     results/digits-1\n"


def test_quiet_shows_nothing() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True), quiet=True)
    screen.banner([("a", "b")], "title")
    for event in (start(2), step(1), EVALUATE, {"event": "warning", "message": "slow disk"}, END):
        screen(made(event))
    screen.close()
    assert out.getvalue() == ""


def test_an_ascii_output_gets_ascii() -> None:
    raw = io.BytesIO()
    screen = Screen(
        Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), force_terminal=False)
    )
    screen(made(EVALUATE))
    screen(made({"event": "warning", "message": "naïve → 5 µs"}))
    assert raw.getvalue().decode("ascii").splitlines() == [
        "epoch 4  step 69  validation loss 0.1523  accuracy 0.9617  * best",
        "warning: na?ve ? 5 ?s",
    ]


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError("input/output error"), SystemExit(1), KeyError("bug")]
)
def test_a_display_that_fails_does_not_end_the_run(
    error: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    screen, _ = piped()
    screen(made(start(3)))

    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(screen._display.console, "print", fail)
    for number in (1, 2, 3):
        screen(made(step(number)))
    assert len(caplog.records) == 1
    assert "the run continues" in caplog.text


def test_unknown_events_and_odd_values_are_harmless(caplog: pytest.LogCaptureFixture) -> None:
    screen, out = piped()
    screen(made({"event": "monitor", "step": 1, "devices": None, "host": None}))
    screen(made(start(None)))
    screen(made(step(1, loss="nan", samples=None, seconds=0)))
    screen(made({"event": "evaluate", "step": 1, "epoch": 0, "loss": None, "metrics": None}))
    assert out.getvalue().splitlines() == ["epoch 1  step 1/?  loss nan", "epoch 1  step 1"]
    assert not caplog.records
