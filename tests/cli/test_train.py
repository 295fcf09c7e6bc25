"""Tests of ``orchestrator train`` before and without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import CPU, SMALL, Call, check_answer


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
