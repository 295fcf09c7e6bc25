"""Tests of ``orchestrator watch`` as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_run import write_run
from orchestrator.live.watch import watching
from tests.cli.helpers import Call, check_answer


def test_one_frame_of_a_finished_run(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "run1", FakeRun(experts=8, workers=2, hosted=True))
    answer = call("watch", "run1", "--once")
    assert answer.code == 0
    assert answer.lines[0].split() == ["run1", "completed"]
    assert max(map(len, answer.lines)) <= 120
    assert "\x1b" not in answer.out


def test_the_view_of_a_finished_run_ends_by_itself(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "run1")
    answer = call("watch", "run1", "--interval", "0.1")
    assert answer.code == 0
    assert answer.out.count("progress ") == 1


@pytest.mark.parametrize("made_before", ["", "run1", "run1/logs", "run1/.hidden"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_that_has_not_begun_is_waited_for(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: str, scheme: str
) -> None:
    (tmp_path / made_before).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(watching.time, "sleep", lambda _: write_run(tmp_path / "run1"))
    answer = call("watch", f"{scheme}{tmp_path}/run1")
    assert answer.code == 0
    assert "waiting for it" in answer.lines[0]
    assert answer.lines[-1].endswith("completed: all epochs done")


def test_a_remote_folder_is_shown(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "run1", FakeRun(ends="killed"))
    answer = call("watch", f"file://{tmp_path}/run1", "--once")
    assert answer.code == 0
    assert "no event for" in answer.lines[0]


def test_mistakes_are_answered_in_a_line(call: Call, tmp_path: Path) -> None:
    check_answer(call("watch", "none", "--once"), "there is no folder none")
    check_answer(call("watch", "none/run1"), "there is no folder none/run1")
    check_answer(call("watch", ".", "--once"), "there is no run in .")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    check_answer(call("watch", "."), "there is no run in .")
    check_answer(call("watch", "notes.txt"), "there is no folder notes.txt")
    check_answer(call("watch", "ftp://host/run"), "ftp:// is not known")
    write_run(tmp_path / "run1")
    check_answer(call("watch", "run1", "--interval", "0"), "--interval is 0")
