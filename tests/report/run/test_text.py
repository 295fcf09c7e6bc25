"""Tests of performance_summary.txt."""

import pytest

from harness.fakes.fake_events import PHASES_PARALLEL, FakeRun, run_events
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.page import page
from orchestrator.report.run.text import WIDTH, performance_summary, verdict_lines

RUNS = {
    "dense": FakeRun(),
    "moe": FakeRun(
        gpu=True,
        experts=8,
        steps=60,
        compiled="compiled",
        ooms=1,
        warnings=("memory rises " * 30, "hot", "hot"),
    ),
    "one": FakeRun(steps=1, epochs=1),
    "none": FakeRun(steps=0, ends="failed"),
    "killed": FakeRun(ends="killed"),
    "resumed": FakeRun(resume_at=77),
    "broken": FakeRun(broken={5: "nan"}, ends="stopped"),
    "parallel": FakeRun(workers=3, recover_at=77, phases=PHASES_PARALLEL),
    "hosted": FakeRun(hosted=True, workers=3, experts=5, layers=2, recover_at=77),
    "hosted, large": FakeRun(hosted=True, workers=12, experts=64, layers=24, steps=40, speeds=(1.0, 2.0)),
    "hostile": FakeRun(name="x\n\x1b[31m" + "y" * 300, warnings=("a\nb\x00",)),
}


def text_of(tmp_path, run):
    return performance_summary(run_record(tmp_path, run))


@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_plain_and_within_the_width(tmp_path, name):
    text = text_of(tmp_path, RUNS[name])
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert all(char.isprintable() or char == "\n" for char in text)
    assert text.endswith("\n")
    assert "verdict" in text


def test_a_gpu_run_has_all_sections(tmp_path):
    text = text_of(tmp_path, RUNS["moe"])
    for text_part in (
        "completed (all epochs done)", "tokens per second", "compiled in 21.4 s", "forward",
        "34.0%", "peak reserved", "84.7%",
        "activations", "gpu 0 utilization", "checkpoints", "1 recovery, micro-batch now 128",
        "hot (×2)", "best accuracy", "TFLOP/s",
        "layers × experts      4 × 8",
    ):  # fmt: skip
        assert text_part in text, text_part


def test_sections_without_events_are_left_out(tmp_path):
    text = text_of(tmp_path, RUNS["none"])
    assert "not compiled" in text
    assert "TaskFailed: ValueError" in text
    assert "A step" not in text
    assert "Quality" not in text


def test_unfinished_and_resumed_runs_say_so(tmp_path):
    assert "killed, or is still running" in text_of(tmp_path / "a", RUNS["killed"])
    assert "1 time (at step 60); 17 steps done again" in text_of(tmp_path / "b", RUNS["resumed"])


def test_a_run_on_several_workers_describes_them(tmp_path):
    text = text_of(tmp_path, RUNS["parallel"])
    for text_part in (
        "strategy              data_parallel",
        "workers               2 (3 at first), gloo, on 1 node", "communication", "12.0%",
        "step 77: worker 1 was lost", "1 time in 12.3 s on average; 17 steps repeated", "goodput",
        "blocked 5 ms each",
        "  recovery              ",
    ):  # fmt: skip
        assert text_part in text, text_part
    assert "resumed" not in text  # no user resumed it
    single = text_of(tmp_path / "one", RUNS["dense"])
    assert "workers               1\n" in single
    assert "recovered" not in single


def test_an_expert_parallel_run_describes_its_hosts(tmp_path):
    text = text_of(
        tmp_path / "a", FakeRun(hosted=True, workers=3, experts=5, layers=2, speeds=(1.0, 2.0, 4.0))
    )
    for text_part in (
        "strategy              expert_parallel", "gate                  replicated",
        "placement             5 experts of 2 layers on 3 hosts",
        "imbalance             slowest host of each step ", "(steps 61 to 120)", "speed 4×, ",
        "of the work, time ",
        "21.3 MiB and 21,845 rows per step to other hosts", "9.6 ms per step, 11.0% of a step",
    ):  # fmt: skip
        assert text_part in text, text_part
    assert "Hosts\n-----" not in text_of(tmp_path / "b", RUNS["parallel"])
    large = text_of(tmp_path / "c", RUNS["hosted, large"])
    assert "Hosts\n-----" in large
    assert "host 3 " not in large, "twelve hosts are better seen in the picture"


def test_unequal_shares_are_shown(tmp_path):
    events = [
        event | {"shares": [0.75, 0.25], "sharding": "zero2"} if event["event"] == "start" else event
        for event in run_events(FakeRun(workers=2))
    ]
    assert "2, gloo, sharding zero2, on 1 node, shares 75% / 25%" in performance_summary(
        events_record(tmp_path, events)
    )


def test_non_finite_losses_are_shown(tmp_path):
    assert "the loss of 1 step, first at step 5" in text_of(tmp_path, RUNS["broken"])


def test_missing_steps_are_shown(tmp_path):
    events = [
        event | {"total_steps": 500} if event["event"] == "start" else event
        for event in run_events(FakeRun(ends="killed"))
    ]
    assert "120 of 500" in performance_summary(events_record(tmp_path, events))


def test_an_empty_record_has_a_summary(tmp_path):
    assert "unfinished" in performance_summary(events_record(tmp_path, []))


def test_the_changes_of_experts_are_counted(tmp_path):
    text = performance_summary(evolving_record(tmp_path))
    assert "changes               2 born, 1 warmed, 1 merged, 1 pruned, 1 undone" in text
    assert "layers × experts      2 × 5" in text


def test_the_terminal_says_what_page_and_text_say(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=120))
    learning, bound_by = verdict_lines(record)
    text = performance_summary(record)
    assert learning.startswith("learning: the loss ")
    assert bound_by.startswith("speed: compute is the limit (")
    for line in (learning, bound_by):
        headline = line.partition(": ")[2].partition(" (")[0]
        assert headline.capitalize() in text
        assert headline.capitalize() in page(record)
    assert verdict_lines(run_record(tmp_path / "short", FakeRun(steps=4, epochs=1))) == []
