"""LoRA against full fine-tuning, with a small model in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import lora
from harness.runs.benchmark_runs import run_benchmark, wrong_figures


def test_each_way_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A process of its own is for the peak of memory, and takes seconds to import torch.
    monkeypatch.setattr(lora, "in_own_process", lambda function: function())
    (table,) = run_benchmark("models.lora", "--layers 1 --tokens 8 --steps 1 --rank 4", tmp_path)
    assert table.names == list(lora.WAYS)
    assert wrong_figures(table, ("gradients GB", "optimizer GB", "peak GB")) == []
    trained = [float(cell.split()[0]) for cell in table.cells("trained")]
    assert trained[0] > 10 * trained[1]
    assert trained[1] == trained[2], "PEFT adapts the same matrices"
