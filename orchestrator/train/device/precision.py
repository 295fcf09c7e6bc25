"""The precision of a pass: fp32, or autocast to bf16 or fp16 over fp32 weights.

In fp8 autocast is to bf16: the experts quantise the operands of their products themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from experts.transformers.lora.adapters import shorten_frozen
from orchestrator.train.device.short_weights import computing_weights
from orchestrator.types import PrecisionName

_INITIAL_SCALE = 2.0**16
_MIN_SCALE = 2.0**-14
_GROWTH_INTERVAL = 2000  # steps with finite gradients before the scale doubles
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(kind: PrecisionName, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass computes in this precision."""
    return nullcontext() if kind == "fp32" else torch.autocast(device.type, dtype=_DTYPES[kind])


def store_frozen(model: nn.Module, kind: PrecisionName) -> None:
    """Keep the frozen matrices beside adapters in this precision: half the memory, and equal results."""
    if kind != "fp32":
        shorten_frozen(model, _DTYPES[kind])


class Precision:
    """Autocast and, in fp16, the loss scale.

    The scale lives on the device, so that no step waits for the host.
    """

    def __init__(
        self, kind: PrecisionName, device: torch.device, short_weights: nn.Module | None = None
    ) -> None:
        """``short_weights`` is the model if its weights are stored in bf16."""
        if device.type == "cpu" and kind != "fp32":
            # Torch warns with some fifty C++ frames that a CPU has no units for bf16.
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        self.kind: PrecisionName = kind
        self.device = device
        self._short_weights = short_weights
        self.scale = torch.full((), _INITIAL_SCALE, device=device) if kind == "fp16" else None
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that autocast computes in; None in fp32."""
        return _DTYPES.get(self.kind)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context of a forward pass."""
        with self.weights(), autocast(self.kind, self.device):
            yield

    def weights(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass and its backward pass, in which blocks may be recomputed."""
        if self._short_weights is None:
            return nullcontext()
        return computing_weights(self._short_weights, self.kind)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the loss times the loss scale: the start of the backward pass."""
        return gradient if self.scale is None else gradient * self.scale

    def update(self, finite: Tensor) -> None:
        """Halve the scale if a gradient overflowed in a step; double it after many good steps.

        In place, since a captured step reads and writes the same memory."""
        if self.scale is None:
            return
        good_steps = torch.where(finite, self._good_steps + 1, 0)
        grows = good_steps >= _GROWTH_INTERVAL
        self._good_steps.copy_(torch.where(grows, 0, good_steps))
        grown = torch.where(grows, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale / 2))

    def scale_underflowed(self) -> bool:
        """Return whether the scale fell so far that no gradient is representable.

        Reads from the device, so it is called at the logging interval only.
        """
        return self.scale is not None and float(self.scale) < _MIN_SCALE

    def state_dict(self) -> dict[str, float]:
        if self.scale is None:
            return {}
        return {"scale": float(self.scale), "good_steps": float(self._good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.scale is not None and "scale" in state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(int(state["good_steps"]))
