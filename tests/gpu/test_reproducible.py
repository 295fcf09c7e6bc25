"""Runs with the same bits on one to four ranks of a GPU over NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.gpu_ranks import skip_without
from harness.hosts.ranks import run_ranks
from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.combinations import Case, run_in_one_process, run_on_host
from orchestrator.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BASE: dict[str, Any] = {
    "reproducible": True,
    "epochs": 10,
    "learning_rate": 3e-3,
    "schedule": "constant",
    "log_every": 1,
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "trackers": (),
    "monitor_gpu": False,
    "plots": "off",
    "batch_size": 3,
    "global_batch_size": 14,
}
EXPERTS: dict[str, Any] = {
    "task": "synthetic",
    "vocabulary": 64,
    "width": 64,
    "layers": 2,
    "experts": 7,
    "expert_hidden_size": (64, 128, 64, 192, 64, 64, 128),
    "top_k": 2,
    "sequence_length": 96,
    "samples": 60,
    "balance_loss": 0.02,
}


def checkpoint_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor in the newest checkpoint of a run."""
    loaded, _ = CheckpointStore(run_dir / "checkpoints", keep=3, repair=False).newest_good()
    assert loaded is not None
    return {
        f"{kind}/{name}": tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for kind, tensors in loaded.contents.tensors.items()
        for name, tensor in tensors.items()
    }


def settings_of(name: str, folder: Path) -> Mapping[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "fp32": EXPERTS | {"precision": "fp32"},
        "bf16": EXPERTS | {"precision": "bf16"},
        "fp16": EXPERTS | {"precision": "fp16"},
        "one size, recomputed": EXPERTS
        | {"precision": "bf16", "expert_hidden_size": (128,), "activation_checkpointing": "on"},
        "average": EXPERTS | {"precision": "bf16", "ema_decay": 0.9, "evaluate_ema": True},
        "unfused sizes": EXPERTS | {"precision": "bf16", "expert_hidden_size": (40, 24, 40, 56, 24, 8, 40)},
        "compiled": EXPERTS | {"precision": "bf16", "compile": "on"},
        "in chunks": EXPERTS | {"precision": "bf16", "exchange_chunks": 2},
        "bounded rows": EXPERTS | {"precision": "bf16", "exchange_rows": "bounded"},
        "evolution": EXPERTS
        | {
            "precision": "bf16",
            "evolution": "bold",
            "sleep_every": 2,
            "birth_entropy": 0.1,
            "birth_patience": 1,
            "newborn_warmup": 2,
            "change_tolerance": 1000.0,
        },
    }
    if name in cases:
        return BASE | cases[name]
    data = [str(save_sums(folder / "sums.jsonl", 24))]
    files = {"model": str(save_tiny_model(folder / "model")), "data": data, "validation_data": data}
    lora = {"lora": 3} if name == "lm with adapters" else {}
    return BASE | files | lora | {"task": "lm", "sequence_length": 96, "precision": "bf16"}


OF_HOSTS = ("in chunks", "bounded rows")
"""Cases with settings of expert hosts."""
NAMES = [
    *("fp32", "bf16", "fp16", "one size, recomputed", "average", "unfused sizes", "compiled", "evolution"),
    *("lm", "lm with adapters", *OF_HOSTS),
]


@pytest.mark.parametrize("strategy", ["expert_parallel", "data_parallel"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_same_bits_on_one_to_four_ranks(name: str, strategy: str, tmp_path: Path) -> None:
    if name in OF_HOSTS and strategy != "expert_parallel":
        pytest.skip("data parallel exchanges no rows")
    sizes = (2, 3, 4) if strategy == "expert_parallel" and name in ("bf16", "fp32") else (3,)
    skip_without("nccl", max(sizes))
    settings = settings_of(name, tmp_path)
    steps = 9
    of_one = {key: value for key, value in settings.items() if not key.startswith("exchange_")}
    one = run_in_one_process(Case(name, None, {**of_one, "workers": 1}, steps), tmp_path / "one", "cuda:0")
    assert [one.refused, one.failed] == ["", ""]
    expected = checkpoint_bytes(tmp_path / "one")
    for size in sizes:
        case = Case(name, None, {**settings, "workers": size, "parallel_strategy": strategy}, steps)
        folder = tmp_path / str(size)
        outcomes = run_ranks(run_on_host, size, [case], folder, "nccl", timeout=300)
        assert [each[name].refused + each[name].failed for each in outcomes] == [""] * size
        assert outcomes[0][name].losses == one.losses
        assert outcomes[0][name].changes == one.changes
        found = checkpoint_bytes(folder / "hosts-0")
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []
