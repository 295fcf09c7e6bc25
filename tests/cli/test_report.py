"""Tests of ``orchestrator report`` with several runs: the summary on the screen, and the files."""

from __future__ import annotations

import json
from pathlib import Path

from harness.fakes.fake_events import FakeRun
from tests.cli.helpers import Call, check_answer
from tests.report.comparison.helpers import write_named


def test_two_runs_are_compared_on_the_screen_and_in_files(call: Call, tmp_path: Path) -> None:
    write_named(tmp_path / "a", FakeRun(steps=40), optim_learning_rate=0.1)
    write_named(tmp_path / "[b]", FakeRun(steps=40, seed=1), optim_learning_rate=0.2)
    answer = call("report", "a", "[b]")
    assert answer.code == 0
    text = "\n".join(answer.lines)
    assert "optim.learning_rate │ 0.1 │ 0.2" in text
    assert "│ [b]" in text or "┃ [b]" in text, "a name is no markup"
    assert "losses of a and [b] differ from step 1 on" in text
    assert answer.lines[0] == "The same validation loss in all runs"
    assert text.count("The noise is unknown") == 1
    assert (tmp_path / "results/comparison/comparison.html").is_file()
    content = json.loads((tmp_path / "results/comparison/comparison.json").read_text())
    assert [run["label"] for run in content["runs"]] == ["a", "[b]"]


def test_a_remote_run_is_compared_with_a_local_one(call: Call, tmp_path: Path) -> None:
    write_named(tmp_path / "a", FakeRun(steps=20, epochs=1))
    far = write_named(tmp_path / "far", FakeRun(steps=20, epochs=1))
    answer = call("report", "a", f"file://{far}", "--out", "both")
    assert answer.code == 0
    assert "losses of a and far are equal to the bit in all 20 common steps" in "\n".join(answer.lines)
    assert (tmp_path / "both/comparison.html").is_file()


def test_mistakes_are_answered(call: Call, tmp_path: Path) -> None:
    write_named(tmp_path / "a", FakeRun(steps=20, epochs=1))
    check_answer(call("report", "a", "a/"), "a was given twice")
    check_answer(call("report", "a", "none"), "none does not exist")
    check_answer(call("report", "a", "--out", "there"), "--out is the folder of a comparison")
    check_answer(call("report", "a", "b", "--out", "s3://bucket/x"), "a local folder")
