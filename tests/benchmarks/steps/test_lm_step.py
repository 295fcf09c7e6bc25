"""The step of a language model, ours and that of transformers: both train the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.runs.benchmark_runs import run_benchmark, wrong_figures

FLAGS = "--small --layers 2 --samples 4 --sequence-length 64 --steps 8 --peers grouped_mm:fp32"
LARGEST_DIFFERENCE = 0.05
"""Between the last losses of two initialisations. Twelve steps lower the loss by four times as much."""


@pytest.mark.extended
def test_the_last_losses_agree(tmp_path: Path) -> None:
    (table,) = run_benchmark("steps.lm_step", FLAGS, tmp_path)
    assert table.names == ["ours", "transformers grouped_mm, fp32 weights"]
    # Only the peak of a GPU is known for transformers.
    assert wrong_figures(table, may_be_zero=("peak GiB",)) == []
    ours, theirs = map(float, table.cells("last loss"))
    assert abs(ours - theirs) < LARGEST_DIFFERENCE
