"""The MoE layer: gate, dispatch, bank, combine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experts.bank import ExpertBank
from experts.dispatch import combine, dispatch
from experts.gate import Gate
from experts.types import Routing


class MoELayer(nn.Module):
    """Routed experts of any sizes in place of a feed-forward block. Returns its output and what the gate decided.

    ``load_E`` counts the tokens per expert of the previous optimizer step. ``forward`` only reads it; whoever runs the
    steps sums the counts of a step's routings and hands them to ``load.settle``."""

    load_E: Tensor

    def __init__(self, width: int, sizes: Sequence[int], top_k: int) -> None:
        super().__init__()
        self.gate = Gate(width, len(sizes), top_k)
        self.bank = ExpertBank(width, sizes)
        self.register_buffer("load_E", torch.zeros(len(sizes), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.gate(x_TD, self.load_E)
        rows_RD, trip = dispatch(x_TD, routing, self.bank.slot_E)
        made_RD = self.bank(rows_RD, trip.counts_S)
        return combine(made_RD, trip).reshape(x.shape).to(x.dtype), routing
