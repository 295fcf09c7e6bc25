"""Fingerprints of models' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experts.transformers.files.shards import fingerprint
from harness.lm.families import build


def saved(folder: Path, model: Any, shard_size: str) -> Path:
    model.config._experts_implementation = None
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def test_a_model_is_known_again_in_other_files(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", build("Qwen3-MoE", torch.float32), "8KB")
    second = saved(tmp_path / "second", build("Qwen3-MoE", torch.float32), "1GB")
    assert fingerprint(first) == fingerprint(second)


def test_other_weights_of_the_same_shapes_have_another_fingerprint(tmp_path: Path) -> None:
    model = build("Qwen3-MoE", torch.float32)
    before = fingerprint(saved(tmp_path / "before", model, "1GB"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3
    assert fingerprint(saved(tmp_path / "after", model, "1GB")) != before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model"):
        fingerprint(tmp_path)
