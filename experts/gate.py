"""The gate: which experts each token goes to, with which weights. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.kernels import fused, fused_gate
from experts.types import Routing, Scores

Once = Callable[[Callable[[], Tensor]], Tensor]


class Gate(nn.Module):
    """Top-k of softmax or sigmoid scores, computed in at least fp32. ``normalise``: the weights of a token's experts sum to
    one (not for k = 1, where that would cut the gate off from the loss). ``bias_E`` is added to the scores when experts are
    chosen, and to nothing else: it moves by ``bias_rate`` after each optimizer step (``load.settle``)."""

    bias_E: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalise: bool = True,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k is {top_k}; with {experts} experts it must lie between 1 and {experts}")
        self.top_k, self.scores, self.normalise, self.bias_rate = top_k, scores, normalise, bias_rate
        self.weight_ED = nn.Parameter(torch.empty(experts, width).normal_(0.0, 0.02))
        self.register_buffer("bias_E", torch.zeros(experts))

    def forward(
        self, x_TD: Tensor, previous_E: Tensor, noise_TD: Tensor | None = None, once: Once | None = None
    ) -> Routing:
        """Route tokens. ``previous_E`` counts the tokens per expert of the previous optimizer step, over all hosts and
        micro-batches: the balance loss weighs this step's probabilities by them, so it is a plain sum over tokens.
        ``noise_TD`` is multiplied to what the gate sees. ``once`` makes a choice, or repeats one, in a pass that is repeated."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = self._logits(x_TD, noise_TD)
            share_E = scaled_share(previous_E, logits_TE.dtype)
            if (
                fused.available(logits_TE)
                and self.scores == "softmax"
                and not self.bias_rate
                and once is None
            ):
                normalise = self.normalise and self.top_k > 1
                weights_TK, experts_TK, balance, z = fused_gate.choose(
                    logits_TE, share_E, self.top_k, normalise
                )
            else:
                scores_TE, probabilities_TE = self._scores(logits_TE)
                weights_TK, experts_TK = self._choose(scores_TE, once)
                balance = (probabilities_TE * share_E).sum()
                z = logits_TE.logsumexp(-1).square().sum()
        chosen_R = experts_TK.flatten()
        counts_E = torch.zeros_like(previous_E).scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        return Routing(experts_TK, weights_TK, counts_E, balance, z)

    def _logits(self, x_TD: Tensor, noise_TD: Tensor | None) -> Tensor:
        if (
            noise_TD is None
            and x_TD.dtype == self.weight_ED.dtype == torch.bfloat16
            and fused.available(x_TD)
        ):
            return fused_gate.gate_logits(x_TD, self.weight_ED)
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        seen_TD = x_TD.to(exact) if noise_TD is None else x_TD.to(exact) * noise_TD
        return F.linear(seen_TD, self.weight_ED.to(exact))

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What experts are weighed by, and the same as probabilities, for the balance loss."""
        if self.scores == "softmax":
            probabilities_TE = logits_TE.softmax(-1)
            return probabilities_TE, probabilities_TE
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / _positive(scores_TE.sum(-1, keepdim=True))

    def _choose(self, scores_TE: Tensor, once: Once | None) -> tuple[Tensor, Tensor]:
        if not self.bias_rate and once is None:
            weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        else:
            biased_TE = scores_TE.detach() + (self.bias_E.to(scores_TE.dtype) if self.bias_rate else 0.0)
            experts_TK = (once or _now)(lambda: biased_TE.topk(self.top_k, dim=-1).indices)
            weights_TK = scores_TE.gather(-1, experts_TK)
        if self.normalise and self.top_k > 1:
            weights_TK = weights_TK / _positive(weights_TK.sum(-1, keepdim=True))
        return weights_TK, experts_TK


def _now(make: Callable[[], Tensor]) -> Tensor:
    return make()


def _positive(total: Tensor) -> Tensor:
    """A divisor that is not zero, where all scores of a token are, and not so small that a gradient overflows."""
    return total.clamp(min=1e-12)


def scaled_share(previous_E: Tensor, dtype: torch.dtype) -> Tensor:
    """The share of tokens each expert had, times the number of experts: all ones when evenly used, or before step one."""
    total = previous_E.sum()
    even = torch.ones_like(previous_E, dtype=dtype)
    return torch.where(total > 0, previous_E.to(dtype) * len(previous_E) / total.clamp(min=1).to(dtype), even)


def noise(seed: int, position_T: Tensor, width: int, size: float, dtype: torch.dtype) -> Tensor:
    """Factors of 1 ± ``size``, uniform: a function of the seed and of a token's place in the global batch, whoever draws it."""
    column_D = torch.arange(width, device=position_T.device)
    mixed_TD = position_T.unsqueeze(1) * -7046029254386353131 + column_D * -4658895280553007687 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed_TD = (mixed_TD ^ ((mixed_TD >> shift) & ((1 << (64 - shift)) - 1))) * factor
    mixed_TD = mixed_TD ^ ((mixed_TD >> 31) & ((1 << 33) - 1))
    uniform_TD = ((mixed_TD >> 40) & 0xFFFFFF).to(dtype) / 2**24
    return 1.0 + size * (2.0 * uniform_TD - 1.0)
