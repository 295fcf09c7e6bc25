"""The gate: which experts each token goes to, with which weights. See ``types`` for the letters of shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.types import Routing


class Gate(nn.Module):
    """Top-k of softmax scores, computed in at least fp32. The weights of the chosen experts are normalised to sum to one
    (not for k = 1, where that would cut the gate off from the loss). Nothing is stored on the module."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k is {top_k}; with {experts} experts it must lie between 1 and {experts}")
        self.top_k = top_k
        self.weight_ED = nn.Parameter(torch.empty(experts, width))

    def forward(self, x_TD: Tensor, previous_E: Tensor) -> Routing:
        """Route tokens. ``previous_E`` counts the tokens per expert of the previous optimizer step, over all hosts and
        micro-batches: the balance loss weighs this step's probabilities by them, so it is a plain sum over tokens."""
        with torch.autocast(x_TD.device.type, enabled=False):
            exact = torch.promote_types(x_TD.dtype, torch.float32)
            logits_TE = F.linear(x_TD.to(exact), self.weight_ED.to(exact))
            probabilities_TE = logits_TE.softmax(-1)
            weights_TK, experts_TK = probabilities_TE.topk(self.top_k, dim=-1)
            if self.top_k > 1:
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            balance = (probabilities_TE * scaled_share(previous_E, exact)).sum()
            z = logits_TE.logsumexp(-1).square().sum()
        chosen_R = experts_TK.flatten()
        counts_E = torch.zeros_like(previous_E).scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        return Routing(experts_TK, weights_TK, counts_E, balance, z)


def scaled_share(previous_E: Tensor, dtype: torch.dtype) -> Tensor:
    """The share of tokens each expert had, times the number of experts: all ones when evenly used, or before step one."""
    total = previous_E.sum()
    even = torch.ones_like(previous_E, dtype=dtype)
    return torch.where(total > 0, previous_E.to(dtype) * len(previous_E) / total.clamp(min=1).to(dtype), even)
