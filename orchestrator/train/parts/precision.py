"""The arithmetic of forward and backward: fp32, or autocast to bf16 or fp16 over fp32 weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from orchestrator.types import PrecisionName

_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 2.0**-14
_GROWTH_INTERVAL = 2000


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(kind: PrecisionName, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a forward pass computes in this precision."""
    return nullcontext() if kind == "fp32" else torch.autocast(device.type, dtype=_DTYPES[kind])


class Precision:
    """Autocast and, in fp16, the scale of the loss. The scale lives on the device: no step waits for the host."""

    def __init__(self, kind: PrecisionName, device: torch.device) -> None:
        self.kind: PrecisionName = kind
        self.device = device
        self.scale = torch.full((), _FIRST_SCALE, device=device) if kind == "fp16" else None
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.kind, self.device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale

    def update(self, finite: Tensor) -> None:
        """After a step: half the scale when a gradient overflowed, double it after a long run of good ones."""
        if self.scale is None:
            return
        self._good_steps = torch.where(finite, self._good_steps + 1, 0)
        grown = self._good_steps >= _GROWTH_INTERVAL
        self._good_steps = torch.where(grown, 0, self._good_steps)
        self.scale = torch.where(finite, torch.where(grown, self.scale * 2, self.scale), self.scale / 2)

    def scale_underflowed(self) -> bool:
        """Whether the scale fell so far that no gradient is representable. Reads from the device: at the logging interval."""
        return self.scale is not None and float(self.scale) < _LEAST_SCALE

    def state_dict(self) -> dict[str, float]:
        return (
            {} if self.scale is None else {"scale": float(self.scale), "good_steps": float(self._good_steps)}
        )

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.scale is not None and "scale" in state:
            self.scale = torch.full_like(self.scale, state["scale"])
            self._good_steps = torch.full_like(self._good_steps, int(state["good_steps"]))
