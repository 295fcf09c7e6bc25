"""Losses and metrics that count otherwise than by samples have the same bits on any number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.runs.bits import Leg
from harness.runs.combinations import Validated
from harness.runs.exact_runs import DATA, EXACT, EXPERTS, SIZES, assert_equal
from orchestrator.tasks.task import Loss


@dataclass(frozen=True)
class Weighted(Validated):
    """Tokens with weights, some of them zero: the count is their sum, and no whole number."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, labels = batch
        logits, routings = model(x)
        weights = (x[..., 0].abs() * 0.1).masked_fill(x[..., 1] > 0.5, 0.0).flatten()
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        right = (logits.argmax(-1) == labels).flatten()
        metrics = {"weight": weights.sum(), "accuracy": (weights * right).sum()}
        return Loss((losses * weights).sum(), weights.sum(), metrics, tuple(r.counts_E for r in routings))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_counts_that_are_sums_of_weights_have_the_bits_of_one_process(tmp_path: Path) -> None:
    task = Weighted(SIZES, top_k=2, samples=41, dtype=torch.float32, tokens=5)
    variants = {
        "experts": [Leg(3, 4, EXPERTS), Leg(2, 6, EXPERTS)],
        "data": [Leg(3, 6, DATA)],
        "shards": [Leg(2, 6, DATA | {"sharding": "zero3"})],
    }
    assert_equal(tmp_path, task, EXACT, variants, 6)
