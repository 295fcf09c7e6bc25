"""What people see of a sweep: a table on a terminal, a line for each trial elsewhere, and nothing that hurts the sweep."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.record.ledger import TrialRow
from orchestrator.record.sweep_screen import RunningTrial, SweepScreen, headline, live_table, seconds_left
from tests.support.fake_sweep import EVIL, HOSTILE, MIXED, FakeSweep, made, row

ESCAPE = "\x1b"


def piped(width: int = 80, **options) -> tuple[SweepScreen, io.StringIO]:
    out = io.StringIO()
    return SweepScreen(Console(file=out, force_terminal=False, width=width), **options), out


def terminal(width: int = 100, **options) -> tuple[SweepScreen, io.StringIO]:
    out = io.StringIO()
    return SweepScreen(
        Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"}), **options
    ), out


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drawn(table, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def played(screen: SweepScreen, rows) -> None:
    screen.begin(len(rows), 0)
    for one in rows:
        screen.trial_started(one.trial, one.point)
        screen.trial_done(one)


def test_piped_output_is_a_line_for_each_trial(tmp_path) -> None:
    rows = made(tmp_path, MIXED).rows
    screen, out = piped(width=40)
    played(screen, rows)
    screen.close()
    lines = out.getvalue().splitlines()
    assert ESCAPE not in out.getvalue()
    assert len(lines) == 2 * len(rows)
    assert (
        lines[0] == "trial 1 of 36  started  precision fp32, batch_size 16, accumulation_steps 1, workers 1"
    )
    assert lines[1].startswith(
        "trial 1 of 36  completed  precision fp32, batch_size 16, accumulation_steps 1, workers 1  1,546 ± 1.1% samples/s"
    )
    assert lines[3].endswith(MIXED.reason)


def test_a_trial_too_short_for_an_interval_says_so() -> None:
    screen, out = piped(width=200)
    played(screen, [TrialRow(1, {"batch_size": 8}, "completed", samples_per_second=1234.0, interval=None)])
    assert "1,234 ± ? samples/s (measured too briefly for an interval)" in out.getvalue()


def test_the_terminal_has_the_best_rows_and_those_under_way(tmp_path) -> None:
    rows = made(tmp_path, MIXED).rows
    screen, out = terminal()
    played(screen, rows)
    screen.trial_started(37, {"precision": "fp32", "batch_size": 8})
    shown = drawn(screen.table())
    assert shown.count("│") // 6 == 10 + 1, "the ten best and one that runs"
    assert "running" in shown
    assert "35" in shown.splitlines()[-13], "the best is the first"
    screen.close()
    assert "trial 2 failed: ValueError" in plain(out.getvalue())
    assert "infeasible: needs" not in plain(out.getvalue())
    assert out.getvalue().endswith(f"{ESCAPE}[?25h"), "the cursor is given back"
    screen.close()


def test_the_headline_counts(tmp_path) -> None:
    rows = made(tmp_path, MIXED).rows
    told = headline(rows[:20], 2, 36, 20)
    assert told.startswith(
        "20 of 36 trials: 8 completed, 1 stopped, 1 failed, 4 out of memory, 6 infeasible; 2 running; about "
    )
    assert headline([], 0, 4, 0) == "0 of 4 trials"
    assert headline([], 0, 4, 3) == "3 of 4 trials: 3 before"


def test_the_time_left_is_by_the_mean_and_how_many_run_together() -> None:
    rows = [
        TrialRow(1, {}, "completed", seconds=10.0),
        TrialRow(2, {}, "failed", seconds=2.0),
        TrialRow(3, {}, "infeasible"),
    ]
    assert seconds_left(rows, 2, 8) == pytest.approx(24.0), "six seconds each, two at a time"
    assert seconds_left(rows, 0, 1) == pytest.approx(6.0)
    assert seconds_left(rows, 1, 0) is None
    assert seconds_left([], 1, 5) is None


def test_only_settings_that_differ_are_shown() -> None:
    sweep = FakeSweep()
    rows = [row(sweep, number, {"precision": "fp32", "batch_size": 16 * number}) for number in (1, 2)]
    shown = drawn(live_table(rows, [], 2))
    assert "batch_size 32" in shown
    assert "precision" not in shown
    assert "precision fp32" in drawn(live_table(rows[:1], [], 2)), "of one trial all are"


def test_by_validation_loss_the_lowest_is_first() -> None:
    rows = [
        TrialRow(1, {}, "completed", validation_loss=0.5),
        TrialRow(2, {}, "completed", validation_loss=0.25),
        TrialRow(3, {}, "completed"),
    ]
    lines = drawn(live_table(rows, [], 3, objective="validation_loss")).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["2", "1"]


def test_the_record_brings_its_objective(tmp_path) -> None:
    record = made(tmp_path, FakeSweep(objective="validation_loss"))
    assert "loss" in drawn(live_table(record, [], 36))


def test_text_from_outside_is_text(tmp_path) -> None:
    rows = made(tmp_path, HOSTILE).rows
    for screen, out in (piped(), terminal()):
        played(screen, rows)
        screen.note(f"[bold]{EVIL}[/bold]")
        shown = drawn(screen.table(), 300)
        screen.close()
        assert "[31m\n" not in out.getvalue()
        assert f"{ESCAPE}[31m\n=" not in out.getvalue()
        assert "[bold]" in plain(out.getvalue())
        assert "`[x](//evil.example)`" in shown


def test_an_output_of_few_characters_is_borne() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = SweepScreen(Console(file=out, force_terminal=False, width=80))
    screen.begin(1, 0)
    screen.trial_done(TrialRow(1, {"precision": "ü"}, "failed", "→ ü"))
    out.seek(0)
    assert "precision ?" in out.read()


def test_a_display_that_breaks_leaves_the_sweep_alone() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("gone")

    screen = SweepScreen(Console(file=Broken(), force_terminal=False))
    screen.begin(2, 0)
    screen.trial_done(TrialRow(1, {}, "failed", "x"))
    screen.note("more")
    screen.close()


def test_quiet_says_nothing(tmp_path) -> None:
    screen, out = piped(quiet=True)
    played(screen, made(tmp_path, MIXED).rows)
    screen.note("x")
    screen.close()
    assert out.getvalue() == ""


def test_a_sweep_that_is_taken_up_counts_what_is_done(tmp_path) -> None:
    screen, out = piped()
    screen.begin(24, 6)
    assert out.getvalue() == "6 of 24 trials are done already\n"
    assert "6 of 24 trials: 6 before" in drawn(screen.table())
    known, _ = piped(rows=made(tmp_path, MIXED).rows[:6])
    known.begin(36, 6)
    assert "6 of 36 trials: 3 completed, 1 stopped, 1 failed, 1 infeasible" not in drawn(known.table())
    assert "6 of 36 trials: 2 completed, 1 stopped, 1 failed, 2 infeasible" in drawn(known.table())


def test_running_trials_beyond_the_room_are_counted() -> None:
    running = [RunningTrial(number, {"batch_size": number}) for number in range(1, 20)]
    shown = drawn(live_table([], running, 30))
    assert "19 running" in shown
    assert "batch_size 7" not in shown


def test_no_secret_is_shown() -> None:
    """Of what trials are tried with, of why they fail, and of what is told beside."""
    for make in (piped, terminal):
        screen, out = make(width=200, secrets=("hunter2hunter2",))
        screen.begin(2, 0)
        screen.note("data in /data/hunter2hunter2")
        screen.trial_started(1, {"data_dir": Path("/data/hunter2hunter2"), "batch_size": 4})
        shown = drawn(screen.table())
        screen.trial_done(
            TrialRow(
                1,
                {"data_dir": "/data/hunter2hunter2", "batch_size": 4},
                "failed",
                "no login with hunter2hunter2",
            )
        )
        screen.close()
        assert "hunter2" not in out.getvalue() + shown + drawn(screen.table())
        assert "no login with ***" in plain(out.getvalue())
        assert "data_dir /data/***" in shown
