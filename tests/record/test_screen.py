"""Tests of the output of a run: a bar on a terminal, few plain lines elsewhere, and no harm to the run."""

import io
import re
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from orchestrator.record.screen import Screen, _BarState, _make_bar
from tests.support.fake_placements import expert_event

ESCAPE = "\x1b"


def piped(width: int = 80) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=False, width=width)), out


def terminal(width: int = 80) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})), out


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "epoch": 0,
        "loss": 0.15234,
        "samples": 64,
        "units": 64,
        "seconds": 0.05,
        **fields,
    }


def start(total: int | None, first: int = 0) -> dict[str, Any]:
    return {"event": "start", "total_steps": total, "step": first}


END = {"event": "end", "status": "completed"}
EVALUATE = {
    "event": "evaluate",
    "epoch": 3,
    "step": 69,
    "loss": 0.15234,
    "metrics": {"accuracy": 0.9617},
    "best": True,
}
GPUS = {
    "event": "monitor",
    "host": {"process_memory": 2**30},
    "devices": [{"memory_used": 3 * 2**30}, {"memory_used": None}],
}


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drawn_lines(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]", without_escapes(text)) if line.strip()]


@pytest.mark.parametrize("total", [100, None])
def test_the_users_interval_is_that_of_the_lines_in_a_pipe(total: int | None) -> None:
    screen, out = piped()
    screen.log_every = 20
    screen(start(total))
    for number in range(1, 101):
        screen(step(number))
    steps = [int(number) for number in re.findall(r"step (\d+)/", out.getvalue())]
    assert steps == [1, 20, 40, 60, 80, 100]


def test_samples_per_second_are_samples_whatever_the_loss_counts() -> None:
    screen, out = piped()
    screen(start(10) | {"unit": "samples"})
    for number in range(1, 11):
        screen(step(number, units=1))
    assert "1.3k samples/s" in out.getvalue()


def test_piped_output_is_plain_and_short() -> None:
    screen, out = piped()
    screen(start(200))
    for number in range(1, 201):
        screen(step(number))
    screen(EVALUATE)
    screen({"event": "warning", "message": "slow disk"})
    screen(END)
    lines = out.getvalue().splitlines()
    assert ESCAPE not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert 10 <= len(lines) <= 14
    assert lines[0] == "epoch 1  step 1/200  loss 0.1523  1.3k samples/s"
    assert lines[-3].startswith("epoch 1  step 200/200")
    assert lines[-2] == "epoch 4  step 69  validation loss 0.1523  accuracy 0.9617  ★ best"
    assert lines[-1] == "warning: slow disk"


def test_piped_lines_of_a_resumed_run_continue_from_its_step() -> None:
    screen, out = piped()
    screen(start(100, first=45))
    for number in range(46, 101):
        screen(step(number))
    assert [line.split()[3] for line in out.getvalue().splitlines()] == [
        "46/100",
        "50/100",
        "60/100",
        "70/100",
        "80/100",
        "90/100",
        "100/100",
    ]


def test_a_new_run_is_not_shown_as_resumed() -> None:
    screen, out = piped()
    screen({"event": "resume", "step": 0, "path": None, "skipped": []})
    assert out.getvalue() == ""
    screen({"event": "resume", "step": 40, "path": "step_00000040", "skipped": []})
    assert out.getvalue() == "resumed at step 40 from step_00000040\n"


def test_a_short_run_shows_every_step() -> None:
    screen, out = piped()
    screen(start(3))
    for number in (1, 2, 3):
        screen(step(number))
    assert len(out.getvalue().splitlines()) == 3


def test_piped_lines_are_not_wrapped() -> None:
    screen, out = piped(width=40)
    screen.banner([("folder", "/results/" + "x" * 200)], "run")
    screen({"event": "resume", "step": 40, "path": "/results/" + "y" * 150, "skipped": []})
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_line_fits(width: int) -> None:
    screen, out = terminal(width)
    screen(start(1_000_000, first=999_990))
    screen({"event": "monitor", "host": {}, "devices": [{"memory_used": 139 * 2**30}]})
    for number in range(999_991, 1_000_000):
        screen(step(number, loss=1.234e-05, units=12_345, samples=12_345, seconds=0.1))
    screen(END)
    last = drawn_lines(out.getvalue())[-1]
    assert last.startswith(" 999999/1000000 ")
    assert "loss 1.234e-05  123.5k samples/s  139.0 GiB" in last
    assert all(len(line) <= width for line in drawn_lines(out.getvalue()))
    assert "…" not in last


def test_the_bar_shows_step_loss_speed_memory_and_time() -> None:
    screen, out = terminal()
    screen(start(100))
    screen(step(1))
    screen(GPUS)
    screen(step(50))
    screen(END)
    last = drawn_lines(out.getvalue())[-1]
    assert re.search(r"50/100 .* loss 0\.1523  1\.3k samples/s  3\.0 GiB [-\d:]+", last)
    assert out.getvalue().endswith(f"{ESCAPE}[?25h")  # the cursor is visible again


def test_without_gpus_host_memory_is_shown_and_tokens_if_counted() -> None:
    screen, out = piped()
    screen(start(2))
    screen({"event": "monitor", "host": {"process_memory": 2**30}, "devices": []})
    screen(step(1, units=64 * 128, seconds=0.5))
    assert out.getvalue().strip() == "epoch 1  step 1/2  loss 0.1523  16.4k tokens/s  1.0 GiB"


def test_the_speed_has_the_unit_of_the_task() -> None:
    screen, out = piped()
    screen(start(2) | {"unit": "frames"})
    screen(step(1, units=64 * 128, seconds=0.5))
    assert "16.4k frames/s" in out.getvalue()


@pytest.mark.parametrize(("seconds", "speed"), [(2750.0, "0.023"), (128.0, "0.5"), (5.0, "12.8")])
def test_a_slow_run_shows_the_digits_of_its_speed(seconds: float, speed: str) -> None:
    screen, out = piped()
    screen(start(2))
    screen(step(1, seconds=seconds))
    assert f"  {speed} samples/s" in out.getvalue()


def test_the_speed_is_that_of_the_last_steps() -> None:
    screen, out = piped()
    screen(start(1000))
    screen(step(1, seconds=60.0))  # compiling
    for number in range(2, 101):
        screen(step(number, seconds=1.0))
    assert out.getvalue().splitlines()[-1].endswith("64 samples/s")


def test_an_evaluation_is_a_line_above_the_bar() -> None:
    screen, out = terminal()
    screen(start(100))
    screen(step(69))
    screen(EVALUATE)
    screen(END)
    lines = drawn_lines(out.getvalue())
    text = "validation loss 0.1523  accuracy 0.9617  ★ best"
    evaluation = next(index for index, line in enumerate(lines) if text in line)
    assert evaluation < len(lines) - 1
    assert "69/100" in lines[-1]


def test_only_the_best_evaluation_has_a_star() -> None:
    screen, out = piped()
    screen({**EVALUATE, "best": False, "metrics": {"accuracy": "nan", "note": "text"}})
    assert out.getvalue().strip() == "epoch 4  step 69  validation loss 0.1523  accuracy nan"


WARNINGS = [
    ({"event": "warning", "kind": "disk", "message": "the disk is slow"}, "warning: the disk is slow"),
    ({"event": "failure", "kind": "worker", "message": "rank 1 died"}, "rank 1 died ..."),
    (
        {
            "event": "failure",
            "kind": "worker",
            "message": "host 1 was lost",
            "rank": 1,
            "step": 40,
            "final": False,
        },
        "step 40: host 1 was lost ...",
    ),
    (
        {
            "event": "recovery",
            "total_seconds": 12.3,
            "workers_before": 2,
            "workers": 2,
            "step": 35,
            "lost_steps": 5,
        },
        "recovered in 12.3 s on 2 workers at step 35, 5 steps repeated",
    ),
    (
        {"event": "oom", "step": 12, "micro_batch": 32, "next_micro_batch": 16, "where": "backward"},
        "out of memory at step 12 (backward) with a micro-batch of 32; continuing with 16",
    ),
    (
        {"event": "oom", "step": 2, "micro_batch": 1, "next_micro_batch": None, "where": "forward"},
        "no smaller one is left to try",
    ),
    (
        {"event": "resume", "step": 40, "path": "c/step_00000040", "skipped": []},
        "resumed at step 40 from c/step_00000040",
    ),
    (
        {
            "event": "resume",
            "step": 40,
            "path": "c/step_40",
            "skipped": [{"path": "c/step_60", "reason": "model.safetensors: wrong hash"}],
        },
        "skipped checkpoint step_60: model.safetensors: wrong hash",
    ),
]


@pytest.mark.parametrize(("event", "text"), WARNINGS)
def test_a_warning_is_one_yellow_line(event: dict[str, Any], text: str) -> None:
    screen, out = piped(width=120)
    screen(event)
    assert text in out.getvalue()
    screen, out = terminal(width=120)
    screen(event)
    assert f"{ESCAPE}[33m" in out.getvalue()
    assert text in without_escapes(out.getvalue())


def test_a_recovery_takes_two_lines_and_the_steps_continue() -> None:
    screen, out = piped()
    screen(start(100))
    screen(step(40))
    screen(
        {
            "event": "failure",
            "kind": "worker",
            "message": "host 1 was lost",
            "rank": 1,
            "step": 40,
            "final": False,
        }
    )
    screen(start(100, first=35))
    screen({"event": "resume", "step": 35, "path": "checkpoints/step_00000035", "skipped": []})
    screen(
        {"event": "placement", "sentence": "6 experts on 3 hosts (as before): slowest host 1.12 of the mean"}
    )
    screen(
        {
            "event": "recovery",
            "total_seconds": 12.3,
            "workers_before": 2,
            "workers": 2,
            "step": 35,
            "lost_steps": 5,
        }
    )
    screen(step(36))
    screen({"event": "failure", "kind": "killed", "rank": 0, "step": 36, "final": True})
    lines = [line.split("  loss")[0] for line in out.getvalue().splitlines()]
    assert lines == [
        "epoch 1  step 40/100",
        "step 40: host 1 was lost ...",
        "recovered in 12.3 s on 2 workers at step 35, 5 steps repeated",
        "epoch 1  step 36/100",
    ]


def test_a_group_that_grows_shows_its_recovery_alone() -> None:
    """No failure came before it, and the state comes from memory: there is no checkpoint to name."""
    screen, out = piped()
    screen(step(28))
    screen({"event": "resume", "step": 28, "path": None, "source": "memory", "skipped": []})
    grown = {"total_seconds": 2.5, "workers_before": 2, "workers": 3, "step": 28, "lost_steps": 0}
    screen({"event": "recovery", **grown})
    assert "resumed" not in out.getvalue()
    assert "recovered in 2.5 s on 3 workers instead of 2 at step 28" in out.getvalue()


@pytest.mark.parametrize("open_screen", [piped, terminal])
def test_text_from_outside_is_neither_markup_nor_control(open_screen: Any) -> None:
    screen, out = open_screen(width=120)
    screen.banner([("[red]task[/red]", "[/oops] [bold]x")], "[link=http://x]title")
    screen({"event": "warning", "message": f"[/nope] [blink]a{ESCAPE}[2Jb\nc\rd :smile:"})
    screen({**EVALUATE, "metrics": {"[red]acc": 0.5}})
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
    screen({"event": "failure", "kind": "task", "message": "x" * 5000})
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
    for event in (start(2), step(1), EVALUATE, WARNINGS[0][0], END):
        screen(event)
    screen.close()
    assert out.getvalue() == ""


def test_an_ascii_output_gets_ascii() -> None:
    raw = io.BytesIO()
    screen = Screen(
        Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), force_terminal=False)
    )
    screen(EVALUATE)
    screen({"event": "warning", "message": "naïve → 5 µs"})
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
    screen(start(3))

    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(screen._display.console, "print", fail)
    for number in (1, 2, 3):
        screen(step(number))
    assert len(caplog.records) == 1
    assert "the run continues" in caplog.text


def test_unknown_events_and_odd_values_are_harmless(caplog: pytest.LogCaptureFixture) -> None:
    screen, out = piped()
    screen({"event": "comet"})
    screen({"event": "monitor", "devices": None, "host": None})
    screen(start(None))
    screen(step(1, loss="nan", samples=None, seconds=0))
    screen({"event": "evaluate", "step": 1, "epoch": 0, "loss": None, "metrics": None})
    assert out.getvalue().splitlines() == ["epoch 1  step 1/?  loss nan", "epoch 1  step 1"]
    assert not caplog.records


class SpyFile(io.StringIO):
    """A file that records the threads that write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[int] = []

    def write(self, text: str) -> int:
        self.writers.append(threading.get_ident())
        return super().write(text)


def test_a_step_draws_nothing_itself() -> None:
    """A step event costs a few assignments: rich's thread draws, eight times per second."""
    out = SpyFile()
    screen = Screen(Console(file=out, force_terminal=True, width=80))
    screen(start(100_000))
    out.writers.clear()
    start_s = time.perf_counter()
    for number in range(1, 5001):
        screen(step(number))
    spent_us = (time.perf_counter() - start_s) / 5000 * 1e6
    assert threading.get_ident() not in out.writers
    assert spent_us < 500  # about 2 on a quiet machine; this bound only catches drawing in the step
    screen.close()


def test_a_second_start_opens_a_new_bar_and_close_may_be_repeated() -> None:
    screen, out = terminal()
    screen(start(10))
    screen(step(7))
    screen(start(10, first=4))
    screen(step(5))
    screen.close()
    screen.close()
    finals = [line for line in drawn_lines(out.getvalue()) if "/10" in line]
    assert " 7/10" in "".join(finals)
    assert finals[-1].startswith(" 5/10")
    for thread in threading.enumerate():
        if type(thread).__name__ == "_RefreshThread":
            thread.join(30)
            assert not thread.is_alive()


def test_the_bar_refreshes_at_most_eight_times_a_second() -> None:
    bar = _make_bar(Console(file=io.StringIO(), force_terminal=True), _BarState(total=3))
    assert bar.live.refresh_per_second <= 8


def test_a_notice_is_a_line_of_its_own() -> None:
    screen, out = piped()
    screen({"event": "notice", "message": "measuring the batch size ..."})
    assert out.getvalue() == "measuring the batch size ...\n"


def test_a_placement_is_one_quiet_line() -> None:
    screen, out = piped()
    screen(start(10))
    screen(
        {"event": "placement", "step": 0, "hosts": [], "sentence": "5 experts on 3 hosts\n\x1b[31m(exact)"}
    )
    screen({"event": "placement"})
    screen({"event": "exchange", "step": 10, "steps": 10, "bytes": 4096, "seconds": 0.1, "rows": 4})
    assert out.getvalue().splitlines() == ["5 experts on 3 hosts  [31m(exact)"]
    live, drawn = terminal()
    live({"event": "placement", "sentence": "5 experts on 3 hosts"})
    assert f"{ESCAPE}[2m5 experts on 3 hosts{ESCAPE}[0m" in drawn.getvalue()


def test_a_change_of_experts_is_one_line() -> None:
    screen, out = piped(120)
    screen(start(100))
    screen(expert_event(20, "born", [4], parents=[1], reason="gate entropy\x1b[31m 1.31", experts=5))
    screen(expert_event(30, "grown", [4]))
    screen({"event": "expert_graph", "step": 30, "layers": []})
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step 20  layer 0: expert 4 born from 1, 5 experts now: gate entropy")
    assert ESCAPE not in line


def test_the_metrics_of_a_task_are_shown_with_the_progress():
    screen, out = piped(width=200)
    screen(start(10))
    screen(step(1, metrics={"accuracy": 0.5, "churn": 0.25, "broken": None}))
    screen.close()
    assert "loss 0.1523  accuracy 0.5  churn 0.25" in out.getvalue()
    assert "broken" not in out.getvalue()
