"""Dropout that is the same on any number of hosts. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.moe.context import MoEContext
from experts.moe.gate import uniform


class TokenDropout(nn.Module):
    """Dropout of the features of tokens.

    Its numbers are a function of the step's seed, the layer, and a token's position in the global batch:
    hosts that share the batch draw what one process draws, and a recomputed pass draws the same again.
    ``attach`` gives the module its context and the id of its layer; without one it is torch's dropout."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.context: MoEContext | None = None
        self.layer_id = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.context is None:
            return F.dropout(x, self.share)
        x_TD = x.reshape(-1, x.shape[-1])
        step = self.context.step
        position_T = step.positions(len(x_TD), len(x), x.device)
        keeps_TD = uniform(step.seed + self.layer_id, position_T, x_TD.shape[1], torch.float32) >= self.share
        return (x_TD * (keeps_TD.to(x.dtype) / (1 - self.share))).view_as(x)

    def extra_repr(self) -> str:
        return f"share={self.share}"


def token_dropouts(model: nn.Module) -> list[tuple[str, TokenDropout]]:
    """Return the dropouts of a model with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TokenDropout)]
