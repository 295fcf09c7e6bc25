"""The experts of one layer of a ``transformers`` model, in a bank of ours.

See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from experts.bank import ExpertBank, computing_dtype
from experts.routed import RoutedExperts
from experts.types import Choices


class HostedExperts(RoutedExperts):
    """Experts that a router of ``transformers`` chooses, on this host or on several.

    ``counts_E`` are the tokens per expert of the last forward pass: the model's own outputs have no
    place for them."""

    def __init__(self, bank: ExpertBank, top_k: int) -> None:
        super().__init__(bank)
        self._top_k = top_k
        self.counts_E = torch.zeros_like(self.load_E)

    @property
    def top_k(self) -> int:
        return self._top_k

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        context = self.context
        # A recomputed pass rounds differently: its router may choose another expert in a tie.
        chosen_TK = context.replayed(lambda: experts_TK)
        expert_R = chosen_TK.flatten()
        counts_E = torch.zeros_like(self.load_E).scatter_add_(0, expert_R, torch.ones_like(expert_R))
        if not context.replaying:
            self.counts_E = counts_E
        input_TD = x_TD.to(computing_dtype(x_TD))
        y_TD = self.compute(input_TD, Choices(chosen_TK, weights_TK, counts_E))
        return y_TD.to(x_TD.dtype)
