"""``--batch-size auto`` of workers that divide a model, on GPUs over NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.hosts.gpu_ranks import skip_without
from harness.hosts.ranks import run_ranks
from harness.runs.combinations import Case, run_on_host

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "task": "synthetic",
    "vocabulary": 512,
    "width": 128,
    "layers": 2,
    "experts": 7,
    "expert_hidden_size": (256, 128, 512, 128, 64, 256, 128),
    "sequence_length": 256,
    "samples": 4096,
    "batch_size": "auto",
    "precision": "bf16",
    "epochs": 10,
    "checkpoint_every": 2,
    "gpu_memory_fraction": 0.05,
    "trackers": (),
    "monitor_gpu": False,
    "plots": "off",
    "workers": 3,
}


@pytest.mark.parametrize(
    "divided",
    [
        {"parallel_strategy": "expert_parallel"},
        {"parallel_strategy": "expert_parallel", "sharding": "zero3"},
        {"parallel_strategy": "data_parallel", "sharding": "zero2"},
    ],
    ids=str,
)
def test_one_probe_of_all_workers_finds_a_batch_that_trains(divided: dict[str, Any], tmp_path: Path) -> None:
    skip_without("nccl", 3)
    case = Case("auto", None, SETTINGS | divided)
    outcomes = run_ranks(run_on_host, 3, [case], tmp_path, "nccl", timeout=250)
    assert [each["auto"].refused + each["auto"].failed for each in outcomes] == [""] * 3
    assert len(outcomes[0]["auto"].losses) == case.steps
    choice = json.loads((tmp_path / "hosts-0/plan.json").read_text())["choices"]["batch_size"]
    assert choice["value"] >= 1
    # The second start keeps the size that the first one measured.
    assert "first started" in choice["reason"]
