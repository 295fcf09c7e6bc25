"""The experts of one layer of a ``transformers`` model, in a bank of ours.

See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experts.moe.bank import ExpertBank, computing_dtype
from experts.moe.gate import shift_bias
from experts.moe.routed import RoutedExperts
from experts.types import Choices


@dataclass(frozen=True)
class RouterBias:
    """The bias of a layer's router, and its change in an optimizer step.

    It holds the module that owns the bias, because ``Module.to`` replaces a buffer by another."""

    owner: nn.Module
    name: str
    rate: float

    @property
    def bias_E(self) -> Tensor:
        return getattr(self.owner, self.name)


class HostedExperts(RoutedExperts):
    """Experts that a router of ``transformers`` chooses, on this host or on several.

    ``counts_E`` are the tokens per expert of the last forward pass: the model's own outputs have no
    place for them. ``router_bias`` is the bias that balances them; ``use_balance_bias`` sets it."""

    def __init__(self, bank: ExpertBank, top_k: int) -> None:
        super().__init__(bank)
        self._top_k = top_k
        self.counts_E = torch.zeros_like(self.load_E)
        self.router_bias: RouterBias | None = None

    @property
    def top_k(self) -> int:
        return self._top_k

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        context = self.context
        # A recomputed pass rounds differently: its router may choose another expert in a tie.
        chosen_TK = context.replayed(lambda: experts_TK)
        expert_R = chosen_TK.flatten()
        counts_E = torch.zeros_like(self.load_E).scatter_add_(0, expert_R, self._counted(chosen_TK))
        if not context.replaying:
            self.counts_E = counts_E
        input_TD = x_TD.to(computing_dtype(x_TD))
        y_TD = self.compute(input_TD, Choices(chosen_TK, weights_TK, counts_E))
        return y_TD.to(x_TD.dtype)

    def move_bias(self, counts_E: Tensor) -> None:
        if self.router_bias is not None:
            shift_bias(self.router_bias.bias_E, counts_E, len(counts_E), self.router_bias.rate)

    def _counted(self, chosen_TK: Tensor) -> Tensor:
        """Return 1 for each choice that counts, 0 for those of padding."""
        counted_T = self.context.step.counted_T
        if counted_T is None:
            return torch.ones_like(chosen_TK).flatten()
        return counted_T.reshape(-1, 1).to(chosen_TK).expand_as(chosen_TK).flatten()
