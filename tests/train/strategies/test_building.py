"""Tests of how a strategy is built around a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestrator.errors import UserError
from orchestrator.train.strategies.building import _move_to_device


class StaysBehind(nn.Linear):
    """A model that ignores its move to a device."""

    def to(self, *_: object, **__: object) -> StaysBehind:
        return self


def test_a_model_on_another_device_is_refused() -> None:
    _move_to_device(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(UserError, match="weight of the model is on meta after moving it to cpu; register it"):
        _move_to_device(StaysBehind(2, 2, device="meta"), torch.device("cpu"))
