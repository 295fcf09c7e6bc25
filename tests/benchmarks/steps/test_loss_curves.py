"""The table of differences between the losses of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.steps.loss_curves import differences_of_losses, main, read_losses

RUN = [1.0] * 60
OTHER = [*([1.0] * 25), *([1.5] * 24), 3.0, *([0.0] * 20)]


def test_pairs_are_compared_in_windows_of_the_steps_that_both_have() -> None:
    table = differences_of_losses({"run": RUN, "other": OTHER})
    assert "| run | other run | 1–25 | 26–50 | 51–60 |" in table
    assert "| run | other | 0.0000 (0.0000) | 0.5600 (2.0000) | 1.0000 (1.0000) |" in table
    assert "| other | 1.0000 | 1.5600 | 0.0000 |" in table


@pytest.mark.parametrize("names", [["a/run.json"], ["a/run.json", "b/run.json"]], ids=["one", "equal names"])
def test_one_file_or_equal_names_are_refused(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["loss_curves", "--losses", *names])
    with pytest.raises(SystemExit):
        main()


def test_a_file_is_named_without_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(RUN))
    assert read_losses([file]) == {"plain": RUN}
