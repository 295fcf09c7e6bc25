"""Loading and export of a model with few experts, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import model_files
from harness.runs.benchmark_runs import run_benchmark, wrong_figures


def small_config(config: Any) -> Any:
    """Make the layers narrow: the benchmark takes those of a large model."""
    config.hidden_size = 32
    config.intermediate_size = 32
    config.moe_intermediate_size = 16
    config.num_attention_heads = 2
    config.num_key_value_heads = 1
    config.head_dim = 16
    return config


def test_each_stage_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_config = model_files.model_config
    monkeypatch.setattr(model_files, "model_config", lambda *sizes: small_config(make_config(*sizes)))
    # A process of its own is for the peak of memory, and takes seconds to import torch.
    monkeypatch.setattr(
        model_files, "measured", lambda stage, *arguments: model_files._measure(stage, arguments)
    )
    monkeypatch.setattr(model_files, "GB", 1000)  # such a model has kilobytes
    flags = f"--folder {tmp_path / 'files'} --layers 2 --experts 8 --vocabulary 64 --hosts 1 2"
    (table,) = run_benchmark("models.model_files", flags, tmp_path)
    assert table.names == ["read as host 0 of 1", "read as host 0 of 2", "export"]
    assert wrong_figures(table, ("held GB", "seconds")) == []
    one, half, _ = map(float, table.cells("held GB"))
    assert half < one, "a host of two reads half of the experts"
