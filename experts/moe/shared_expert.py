"""The shared expert of a layer. See ``types`` for the letters of shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experts.kernels.loop import activate
from experts.types import Kind


class SharedExpert(nn.Module):
    """An expert that computes every token, with a weight of one."""

    def __init__(self, width: int, hidden: int, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.up = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        one = torch.ones((), dtype=x_TD.dtype, device=x_TD.device)
        weights_T = one.expand(len(x_TD))
        return self.down(activate(self.up(x_TD), weights_T, self.kind))
