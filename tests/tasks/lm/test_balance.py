"""The auxiliary loss of a step, over the labels of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.tasks.lm import balance
from orchestrator.tasks.lm.balance import StepBalance

NO_LABEL = -100


class TwoWorkers:
    """A step of one pass: three labels on this worker, four on the other."""

    model: nn.Module = nn.Identity()
    is_single_pass = True

    def batches(self) -> Iterator[Any]:
        yield {"labels": torch.tensor([[1, 2, NO_LABEL], [NO_LABEL, 3, NO_LABEL]])}

    def forward(self, function: Any) -> list[Any]:
        raise AssertionError("the pass counts its own choices")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor + 4


def test_the_loss_is_weighted_by_the_labels_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "balance_loss", lambda *_: torch.tensor(2.0, dtype=torch.float64))
    step = StepBalance(0.5)
    step.prepare(TwoWorkers(), lambda *_: (None, torch.empty(0)))
    assert float(step.loss(TwoWorkers.model, None, torch.ones(1))) == 2.0 * 0.5 * (3 + 4)
