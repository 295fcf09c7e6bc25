"""Tests of the progress of a run: a bar on a terminal, few plain lines elsewhere, and its speed."""

import io
import re
import threading

import pytest
from rich.console import Console

from harness.runs.records import made
from harness.runs.screens import END, ESCAPE, EVALUATE, drawn_lines, piped, start, step, terminal
from orchestrator.live.screen.screen import Screen, _make_bar
from orchestrator.record.live.state import RunState

GPUS = {
    "event": "monitor",
    "step": 1,
    "host": {"process_memory": 2**30},
    "devices": [{"memory_used": 3 * 2**30}, {"memory_used": None}],
}


@pytest.mark.parametrize("total", [100, None])
def test_the_users_interval_is_that_of_the_lines_in_a_pipe(total: int | None) -> None:
    screen, out = piped()
    screen.log_every = 20
    screen(made(start(total)))
    for number in range(1, 101):
        screen(made(step(number)))
    steps = [int(number) for number in re.findall(r"step (\d+)/", out.getvalue())]
    assert steps == [1, 20, 40, 60, 80, 100]


def test_samples_per_second_are_samples_whatever_the_loss_counts() -> None:
    screen, out = piped()
    screen(made(start(10) | {"unit": "samples"}))
    for number in range(1, 11):
        screen(made(step(number, units=1)))
    assert "1.3k samples/s" in out.getvalue()


def test_piped_output_is_plain_and_short() -> None:
    screen, out = piped()
    screen(made(start(200)))
    for number in range(1, 201):
        screen(made(step(number)))
    screen(made(EVALUATE))
    screen(made({"event": "warning", "message": "slow disk"}))
    screen(made(END))
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
    screen(made(start(100, first=45)))
    for number in range(46, 101):
        screen(made(step(number)))
    assert [line.split()[3] for line in out.getvalue().splitlines()] == [
        "46/100",
        "50/100",
        "60/100",
        "70/100",
        "80/100",
        "90/100",
        "100/100",
    ]


def test_a_short_run_shows_every_step() -> None:
    screen, out = piped()
    screen(made(start(3)))
    for number in (1, 2, 3):
        screen(made(step(number)))
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_line_fits(width: int) -> None:
    screen, out = terminal(width)
    screen(made(start(1_000_000, first=999_990)))
    screen(made({"event": "monitor", "step": 1, "host": {}, "devices": [{"memory_used": 139 * 2**30}]}))
    for number in range(999_991, 1_000_000):
        screen(made(step(number, loss=1.234e-05, units=12_345, samples=12_345, seconds=0.1)))
    screen(made(END))
    last = drawn_lines(out.getvalue())[-1]
    assert last.startswith(" 999999/1000000 ")
    assert "loss 1.234e-05  123.5k samples/s  139.0 GiB" in last
    assert all(len(line) <= width for line in drawn_lines(out.getvalue()))
    assert "…" not in last


def test_the_bar_shows_step_loss_speed_memory_and_time() -> None:
    screen, out = terminal()
    screen(made(start(100)))
    screen(made(step(1)))
    screen(made(GPUS))
    screen(made(step(50)))
    screen(made(END))
    last = drawn_lines(out.getvalue())[-1]
    assert re.search(r"50/100 .* loss 0\.1523  1\.3k samples/s  3\.0 GiB [-\d:]+", last)
    assert out.getvalue().endswith(f"{ESCAPE}[?25h")  # the cursor is visible again


def test_without_gpus_host_memory_is_shown_and_tokens_if_counted() -> None:
    screen, out = piped()
    screen(made(start(2)))
    screen(made({"event": "monitor", "step": 1, "host": {"process_memory": 2**30}, "devices": []}))
    screen(made(step(1, units=64 * 128, seconds=0.5)))
    assert out.getvalue().strip() == "epoch 1  step 1/2  loss 0.1523  16.4k tokens/s  1.0 GiB"


def test_the_speed_has_the_unit_of_the_task() -> None:
    screen, out = piped()
    screen(made(start(2) | {"unit": "frames"}))
    screen(made(step(1, units=64 * 128, seconds=0.5)))
    assert "16.4k frames/s" in out.getvalue()


@pytest.mark.parametrize(("seconds", "speed"), [(2750.0, "0.023"), (128.0, "0.5"), (5.0, "12.8")])
def test_a_slow_run_shows_the_digits_of_its_speed(seconds: float, speed: str) -> None:
    screen, out = piped()
    screen(made(start(2)))
    screen(made(step(1, seconds=seconds)))
    assert f"  {speed} samples/s" in out.getvalue()


def test_the_speed_is_that_of_the_last_steps() -> None:
    screen, out = piped()
    screen(made(start(1000)))
    screen(made(step(1, seconds=60.0)))  # compiling
    for number in range(2, 101):
        screen(made(step(number, seconds=1.0)))
    assert out.getvalue().splitlines()[-1].endswith("64 samples/s")


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
    screen(made(start(100_000)))
    out.writers.clear()
    for number in range(1, 5001):
        screen(made(step(number)))
    assert threading.get_ident() not in out.writers
    screen.close()


def test_a_second_start_opens_a_new_bar_and_close_may_be_repeated() -> None:
    screen, out = terminal()
    screen(made(start(10)))
    screen(made(step(7)))
    screen(made(start(10, first=4)))
    screen(made(step(5)))
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
    bar = _make_bar(Console(file=io.StringIO(), force_terminal=True), RunState())
    assert bar.live.refresh_per_second <= 8


def test_the_metrics_of_a_task_are_shown_with_the_progress():
    screen, out = piped(width=200)
    screen(made(start(10)))
    screen(made(step(1, metrics={"accuracy": 0.5, "churn": 0.25, "broken": None})))
    screen.close()
    assert "loss 0.1523  accuracy 0.5  churn 0.25" in out.getvalue()
    assert "broken" not in out.getvalue()
