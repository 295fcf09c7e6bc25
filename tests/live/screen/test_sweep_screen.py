"""Tests of the output of a sweep: a table on a terminal, a line per trial elsewhere, and no harm
to the sweep."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.fakes.fake_sweep import EVIL, HOSTILE, MIXED, write_record
from orchestrator.live.screen.sweep_screen import SweepScreen
from orchestrator.record.files.ledger import TrialRow
from tests.report.sweep.test_sweep_table import render

ESCAPE = "\x1b"


def piped(width: int = 80, **options) -> tuple[SweepScreen, io.StringIO]:
    out = io.StringIO()
    return SweepScreen(Console(file=out, force_terminal=False, width=width), **options), out


def terminal(width: int = 100, **options) -> tuple[SweepScreen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    return SweepScreen(console, **options), out


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def play(screen: SweepScreen, rows: Sequence[TrialRow]) -> None:
    """Start and finish each trial in turn."""
    screen.begin(len(rows), 0)
    for row in rows:
        screen.trial_started(row.trial, row.point)
        screen.trial_done(row)


def test_piped_output_has_a_line_per_event(tmp_path) -> None:
    rows = write_record(tmp_path, MIXED).rows
    screen, out = piped(width=40)
    play(screen, rows)
    screen.close()
    lines = out.getvalue().splitlines()
    settings = "precision fp32, batch_size 16, accumulation_steps 1, workers 1"
    assert ESCAPE not in out.getvalue()
    assert len(lines) == 2 * len(rows)
    assert lines[0] == f"trial 1 of 36  started  {settings}"
    assert lines[1].startswith(f"trial 1 of 36  completed  {settings}  1,546 ± 1.1% samples/s")
    assert lines[3].endswith(MIXED.reason)


def test_a_trial_too_short_for_an_interval_says_so() -> None:
    screen, out = piped(width=200)
    play(screen, [TrialRow(1, {"batch_size": 8}, "completed", samples_per_second=1234.0, interval=None)])
    assert "1,234 ± ? samples/s (measured too briefly for an interval)" in out.getvalue()


def test_the_terminal_shows_the_best_and_the_running_trials(tmp_path) -> None:
    rows = write_record(tmp_path, MIXED).rows
    screen, out = terminal()
    play(screen, rows)
    screen.trial_started(37, {"precision": "fp32", "batch_size": 8})
    shown = render(screen.table())
    assert shown.count("│") // 6 == 10 + 1, "the ten best and one that runs"
    assert "running" in shown
    assert "35" in shown.splitlines()[-13], "the best is the first"
    screen.close()
    assert "trial 2 failed: ValueError" in without_escapes(out.getvalue())
    assert "infeasible: needs" not in without_escapes(out.getvalue())
    assert out.getvalue().endswith(f"{ESCAPE}[?25h"), "the cursor is visible again"
    screen.close()


def test_text_from_outside_stays_text(tmp_path) -> None:
    rows = write_record(tmp_path, HOSTILE).rows
    for screen, out in (piped(), terminal()):
        play(screen, rows)
        screen.note(f"[bold]{EVIL}[/bold]")
        shown = render(screen.table(), 300)
        screen.close()
        assert "[31m\n" not in out.getvalue()
        assert f"{ESCAPE}[31m\n=" not in out.getvalue()
        assert "[bold]" in without_escapes(out.getvalue())
        assert "`[x](//evil.example)`" in shown


def test_an_ascii_output_gets_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = SweepScreen(Console(file=out, force_terminal=False, width=80))
    screen.begin(1, 0)
    screen.trial_done(TrialRow(1, {"precision": "ü"}, "failed", "→ ü"))
    out.seek(0)
    assert "precision ?" in out.read()


def test_a_display_that_fails_does_not_end_the_sweep() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("gone")

    screen = SweepScreen(Console(file=Broken(), force_terminal=False))
    screen.begin(2, 0)
    screen.trial_done(TrialRow(1, {}, "failed", "x"))
    screen.note("more")
    screen.close()


def test_quiet_shows_nothing(tmp_path) -> None:
    screen, out = piped(quiet=True)
    play(screen, write_record(tmp_path, MIXED).rows)
    screen.note("x")
    screen.close()
    assert out.getvalue() == ""


def test_a_resumed_sweep_counts_the_finished_trials(tmp_path) -> None:
    screen, out = piped()
    screen.begin(24, 6)
    assert out.getvalue() == "6 of 24 trials are done already\n"
    assert "6 of 24 trials: 6 before" in render(screen.table())
    known, _ = piped(rows=write_record(tmp_path, MIXED).rows[:6])
    known.begin(36, 6)
    assert "6 of 36 trials: 2 completed, 1 stopped, 1 failed, 2 infeasible" in render(known.table())


def test_no_secret_is_shown() -> None:
    """Neither in settings, nor in reasons, nor in notes."""
    for open_screen in (piped, terminal):
        screen, out = open_screen(width=200, secrets=("hunter2hunter2",))
        screen.begin(2, 0)
        screen.note("data in /data/hunter2hunter2")
        screen.trial_started(1, {"data_dir": Path("/data/hunter2hunter2"), "batch_size": 4})
        shown = render(screen.table())
        point = {"data_dir": "/data/hunter2hunter2", "batch_size": 4}
        screen.trial_done(TrialRow(1, point, "failed", "no login with hunter2hunter2"))
        screen.close()
        assert "hunter2" not in out.getvalue() + shown + render(screen.table())
        assert "no login with ***" in without_escapes(out.getvalue())
        assert "data_dir /data/***" in shown
