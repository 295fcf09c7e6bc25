"""Tests of the lines that events show: evaluations, warnings, recoveries, placements, changes of experts."""

from typing import Any

import pytest

from harness.fakes.fake_placements import expert_event
from harness.runs.records import made
from harness.runs.screens import (
    END,
    ESCAPE,
    EVALUATE,
    drawn_lines,
    piped,
    start,
    step,
    terminal,
    without_escapes,
)


def test_a_new_run_is_not_shown_as_resumed() -> None:
    screen, out = piped()
    screen(made({"event": "resume", "step": 0, "path": None, "skipped": []}))
    assert out.getvalue() == ""
    screen(made({"event": "resume", "step": 40, "path": "step_00000040", "skipped": []}))
    assert out.getvalue() == "resumed at step 40 from step_00000040\n"


def test_an_evaluation_is_a_line_above_the_bar() -> None:
    screen, out = terminal()
    screen(made(start(100)))
    screen(made(step(69)))
    screen(made(EVALUATE))
    screen(made(END))
    lines = drawn_lines(out.getvalue())
    text = "validation loss 0.1523  accuracy 0.9617  ★ best"
    evaluation = next(index for index, line in enumerate(lines) if text in line)
    assert evaluation < len(lines) - 1
    assert "69/100" in lines[-1]


def test_only_the_best_evaluation_has_a_star() -> None:
    screen, out = piped()
    screen(made({**EVALUATE, "best": False, "metrics": {"accuracy": "nan", "note": "text"}}))
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
    screen(made(event))
    assert text in out.getvalue()
    screen, out = terminal(width=120)
    screen(made(event))
    assert f"{ESCAPE}[33m" in out.getvalue()
    assert text in without_escapes(out.getvalue())


def test_a_recovery_takes_two_lines_and_the_steps_continue() -> None:
    screen, out = piped()
    screen(made(start(100)))
    screen(made(step(40)))
    screen(
        made(
            {
                "event": "failure",
                "kind": "worker",
                "message": "host 1 was lost",
                "rank": 1,
                "step": 40,
                "final": False,
            }
        )
    )
    screen(made(start(100, first=35)))
    screen(made({"event": "resume", "step": 35, "path": "checkpoints/step_00000035", "skipped": []}))
    placement = {"method": "as before", "sentence": "6 experts on 3 hosts (as before)"}
    screen(made({"event": "placement", **placement}))
    screen(
        made(
            {
                "event": "recovery",
                "total_seconds": 12.3,
                "workers_before": 2,
                "workers": 2,
                "step": 35,
                "lost_steps": 5,
            }
        )
    )
    screen(made(step(36)))
    screen(made({"event": "failure", "kind": "killed", "rank": 0, "step": 36, "final": True}))
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
    screen(made(step(28)))
    screen(made({"event": "resume", "step": 28, "path": None, "source": "memory", "skipped": []}))
    grown = {"total_seconds": 2.5, "workers_before": 2, "workers": 3, "step": 28, "lost_steps": 0}
    screen(made({"event": "recovery", **grown}))
    assert "resumed" not in out.getvalue()
    assert "recovered in 2.5 s on 3 workers instead of 2 at step 28" in out.getvalue()


def test_a_notice_is_a_line_of_its_own() -> None:
    screen, out = piped()
    screen(made({"event": "notice", "message": "measuring the batch size ..."}))
    assert out.getvalue() == "measuring the batch size ...\n"


def test_a_placement_is_one_quiet_line() -> None:
    screen, out = piped()
    screen(made(start(10)))
    screen(
        made(
            {
                "event": "placement",
                "step": 0,
                "hosts": [],
                "sentence": "5 experts on 3 hosts\n\x1b[31m(exact)",
            }
        )
    )
    screen(made({"event": "placement"}))
    screen(made({"event": "exchange", "step": 10, "steps": 10, "bytes": 4096, "seconds": 0.1, "rows": 4}))
    assert out.getvalue().splitlines() == ["5 experts on 3 hosts  [31m(exact)"]
    live, drawn = terminal()
    live(made({"event": "placement", "sentence": "5 experts on 3 hosts"}))
    assert f"{ESCAPE}[2m5 experts on 3 hosts{ESCAPE}[0m" in drawn.getvalue()


def test_a_change_of_experts_is_one_line() -> None:
    screen, out = piped(120)
    screen(made(start(100)))
    screen(made(expert_event(20, "born", [4], parents=[1], reason="gate entropy\x1b[31m 1.31", experts=5)))
    screen(made({"event": "expert_graph", "step": 30, "layers": []}))
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step 20  layer 0: expert 4 born from 1, 5 experts now: gate entropy")
    assert ESCAPE not in line
