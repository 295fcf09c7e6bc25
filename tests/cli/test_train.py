"""Tests of ``orchestrator train`` before and without training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

from harness.runs.small_flags import CPU, SMALL
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.figures.stats import phase_seconds
from orchestrator.types import count_text
from tests.cli.helpers import Call, check_answer


@pytest.mark.parametrize(
    ("mark", "launcher"), [("TORCHELASTIC_RUN_ID", "torchrun"), ("ACCELERATE_MIXED_PRECISION", "accelerate")]
)
def test_another_launcher_is_refused_with_the_command_to_use(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, launcher: str
):
    monkeypatch.setenv(mark, "no")
    answer = call("train", *SMALL)
    check_answer(answer, f"started by {launcher}, which starts one process per GPU")
    assert "orchestrator train --workers N" in answer.err
    assert "ray job submit --working-dir . -- python -m orchestrator train" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_settings_without_effect_are_noted_on_the_screen(call: Call):
    answer = call(
        "train", *SMALL, *CPU, "--max-steps", "1", "--placement", "round_robin", "--exchange-chunks", "2"
    )
    assert answer.code == 0
    (note,) = [line for line in answer.out.splitlines() if line.startswith("note: ")]
    assert note.startswith(
        "note: --placement round_robin, --exchange-chunks 2 are not used: one process has all experts"
    )


def test_screen_summary_and_report_show_the_same_speed(call: Call, tmp_path: Path):
    flags = ("--run-dir", str(tmp_path / "run"), "--max-steps", "12", "--batch-size", "8", "--log-every", "1")
    answer = call("train", *SMALL, *CPU, *flags)
    assert answer.code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    steps = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "step")
    counted_s = [step["seconds"] for step in steps[3:]]
    assert summary["warm_up_steps"] == 3
    assert summary["samples_per_second"] == pytest.approx(8 * 9 / sum(counted_s))
    assert summary["mean_step_seconds"] == pytest.approx(sum(counted_s) / 9)
    assert summary["median_step_seconds"] == median(counted_s)
    speed = f"{summary['units_per_second']:,.0f}"
    assert f"({speed} tokens/s)" in answer.out
    # The speed of the last steps, here of all: the same figure, rounded for the line.
    assert f"{count_text(round(summary['units_per_second']))} tokens/s" in answer.out
    text = (tmp_path / "run" / "performance_summary.txt").read_text()
    assert re.search(rf"tokens per second +{speed}$", text, re.M)
    assert re.search(r"measured over +9 steps, without 3 of warm-up$", text, re.M)
    assert f"{speed} tokens/s" in (tmp_path / "run" / "report.html").read_text()


def test_the_phases_of_a_step_add_up_to_the_mean_step(call: Call, tmp_path: Path):
    flags = ("--run-dir", str(tmp_path / "run"), "--max-steps", "9", "--batch-size", "8", "--log-every", "4")
    assert call("train", *SMALL, *CPU, *flags).code == 0
    record = read_run_record(tmp_path / "run")
    parts = phase_seconds(record)
    assert {"data", "forward", "backward", "optimizer"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(record.summary["mean_step_seconds"])
