"""The gate: chooses experts and weights for each token. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.kernels import fused_gate, launching
from experts.kernels.autocast import without_autocast
from experts.kernels.slot_sort import count_choices
from experts.types import Routing, Scores

Replay = Callable[[Callable[[], Tensor]], Tensor]
"""Returns the result of a function; in a recomputed pass, its result in the first pass."""


class Gate(nn.Module):
    """Top-k of softmax or sigmoid scores, computed in at least fp32.

    ``normalise``: the weights of a token's experts sum to one (not for k = 1, where that would cut
    the gate off from the loss). ``bias_E`` is added to the scores for the choice of experts, and
    not to their weights; it moves by ``bias_rate`` after each optimizer step
    (``balance.update_balance``). ``prior_E`` is the logarithm of a factor on each expert's score: the
    share that a split left it, or minus infinity for an expert that must not be chosen."""

    bias_E: Tensor
    prior_E: Tensor

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalise: bool = True,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k is {top_k}; with {num_experts} experts it must lie between 1 and {num_experts}"
            )
        self.top_k = top_k
        self.chooses_all = top_k == num_experts
        """Whether each token goes to all experts, however many there will be."""
        self.has_prior = False
        self._has_several = top_k > 1
        self.scores: Scores = scores
        self.normalise = normalise
        self.bias_rate = bias_rate
        self.weight_ED = nn.Parameter(torch.empty(num_experts, width).normal_(0.0, 0.02))
        self.register_buffer("bias_E", torch.zeros(num_experts))
        self.register_buffer("prior_E", torch.zeros(num_experts), persistent=False)

    def use_priors(self, priors: Sequence[float]) -> None:
        """Set the prior of each expert."""
        self.has_prior = any(priors)
        # A model in bf16 would round the logarithm of a half.
        prior_E = torch.tensor(list(priors), dtype=torch.promote_types(self.prior_E.dtype, torch.float32))
        if (prior_E.shape, prior_E.dtype) == (self.prior_E.shape, self.prior_E.dtype):
            self.prior_E.copy_(prior_E)
        else:
            self.prior_E = prior_E.to(self.prior_E.device)

    def forward(
        self,
        x_TD: Tensor,
        previous_E: Tensor,
        noise_TD: Tensor | None = None,
        replay: Replay | None = None,
    ) -> Routing:
        """Route tokens.

        ``previous_E`` counts the tokens per expert of the previous optimizer step, over all hosts
        and micro-batches. The balance loss weights this step's probabilities by them, so that it is
        a plain sum over tokens. The gate's input is multiplied by ``noise_TD``. ``replay`` makes a
        recomputed pass repeat the choice of the first."""
        # Logits rounded to bf16 would tie or swap experts: autocast does not apply to the gate.
        with without_autocast(x_TD):
            logits_TE = self.logits(x_TD, noise_TD)
            share_E = scaled_share(previous_E, logits_TE.dtype, self.num_choosable)
            if self._can_fuse(logits_TE) and replay is None:
                weights_TK, experts_TK, balance, z = fused_gate.choose(
                    logits_TE, share_E, self.top_k, self._normalises
                )
            else:
                scores_TE, probabilities_TE = self._scores(logits_TE)
                weights_TK, experts_TK = self._choose(scores_TE, replay)
                balance = (probabilities_TE * share_E).sum()
                z = logits_TE.logsumexp(-1).square().sum()
        counts_E = count_choices(experts_TK, len(previous_E))
        return Routing(experts_TK, weights_TK, counts_E, balance, z)

    @property
    def num_choosable(self) -> int | Tensor:
        """The number of experts that may be chosen."""
        return (self.prior_E > -torch.inf).sum() if self.has_prior else len(self.prior_E)

    @property
    def _normalises(self) -> bool:
        # By the number of experts at construction: a gate that chooses all may go from one expert to two.
        return self.normalise and self._has_several

    def _can_fuse(self, logits_TE: Tensor) -> bool:
        """Whether the fused kernel computes this gate: softmax scores without a bias."""
        return launching.available(logits_TE) and self.scores == "softmax" and not self.bias_rate

    def logits(self, x_TD: Tensor, noise_TD: Tensor | None = None) -> Tensor:
        logits_TE = self._products(x_TD, noise_TD)
        if self.has_prior and self.scores == "softmax":
            logits_TE = logits_TE + self.prior_E.to(logits_TE.dtype)
        return logits_TE

    def _products(self, x_TD: Tensor, noise_TD: Tensor | None) -> Tensor:
        both_bf16 = x_TD.dtype == self.weight_ED.dtype == torch.bfloat16
        if noise_TD is None and both_bf16 and launching.available(x_TD):
            return fused_gate.gate_logits(x_TD, self.weight_ED)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        input_TD = x_TD.to(dtype) if noise_TD is None else x_TD.to(dtype) * noise_TD
        return F.linear(input_TD, self.weight_ED.to(dtype))

    def probabilities(self, x_TD: Tensor) -> Tensor:
        """Return the probability of each expert, without noise. The caller turns autocast off."""
        return self._scores(self.logits(x_TD))[1]

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of experts, and their probabilities for the balance loss."""
        if self.scores == "softmax":
            probabilities_TE = logits_TE.softmax(-1)
            return probabilities_TE, probabilities_TE
        # Sigmoid scores do not sum to one, but the balance loss needs probabilities.
        scores_TE = logits_TE.sigmoid()
        if self.has_prior:
            scores_TE = scores_TE * self.prior_E.exp().to(scores_TE.dtype)
        return scores_TE, scores_TE / _nonzero(scores_TE.sum(-1, keepdim=True))

    def _choose(self, scores_TE: Tensor, replay: Replay | None) -> tuple[Tensor, Tensor]:
        if not self.bias_rate and not self.has_prior and replay is None:
            weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        else:
            bias_E = self.bias_E.to(scores_TE.dtype) if self.bias_rate else 0.0
            # Detached: the bias takes part in the choice only, and a choice has no gradient.
            biased_TE = scores_TE.detach() + bias_E
            if self.has_prior:
                # Masked: a score of zero would still win by its bias, or where all scores underflow.
                biased_TE = biased_TE.masked_fill(self.prior_E == -torch.inf, -torch.inf)

            def chosen() -> Tensor:
                return biased_TE.topk(self.top_k, dim=-1).indices

            experts_TK = chosen() if replay is None else replay(chosen)
            weights_TK = scores_TE.gather(-1, experts_TK)
        if self._normalises:
            weights_TK = weights_TK / _nonzero(weights_TK.sum(-1, keepdim=True))
        return weights_TK, experts_TK


def _nonzero(total: Tensor) -> Tensor:
    """Return a divisor for a sum of scores.

    The sum is zero where all scores of a token underflow; a divisor much smaller than 1e-12
    overflows the gradient."""
    return total.clamp(min=1e-12)


def scaled_share(previous_E: Tensor, dtype: torch.dtype, num_experts: int | Tensor) -> Tensor:
    """Return each expert's share of tokens times the number of experts that may be chosen.

    It is one for all experts when the load is even, and at step 0."""
    total = previous_E.sum()
    even_E = torch.ones_like(previous_E, dtype=dtype)
    share_E = previous_E.to(dtype) * num_experts / total.clamp(min=1).to(dtype)
    return torch.where(total > 0, share_E, even_E)


@torch.no_grad()
def shift_bias(bias_E: Tensor, chosen_E: Tensor, num_choosable: int | Tensor, rate: float) -> None:
    """Move a bias up for experts that were chosen less than the mean, down for the others, in place."""
    # In whole numbers: sum - count * E has the sign of mean - count, without rounding.
    direction_E = torch.sign(chosen_E.sum() - chosen_E * num_choosable)
    bias_E += rate * direction_E.to(bias_E.dtype)


def noise(
    seed: int,
    position_T: Tensor,
    width: int,
    size: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return factors uniform in 1 ± ``size`` for the tokens at these global positions."""
    return 1.0 + size * (2.0 * uniform(seed, position_T, width, dtype) - 1.0)


def uniform(seed: int, position_T: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return numbers uniform from 0 to below 1 for the tokens at these global positions.

    They are a function of the seed, the position and the column, so that any host draws the same
    numbers for a token. The hash is the finalizer of SplitMix64, in signed 64-bit integers: torch
    has no unsigned multiplication, so its constants are written as negative numbers and shifts are
    masked."""
    column_D = torch.arange(width, device=position_T.device)
    row_T1 = _spread(position_T.unsqueeze(1), -7046029254386353131)
    first_TD = row_T1 + _spread(column_D, -4658895280553007687) + seed
    mixed_TD = mix_bits(first_TD)
    # The upper 24 bits: as many as fp32 holds exactly. The finalizer's last step changes lower bits only.
    return ((mixed_TD >> 40) & 0xFFFFFF).to(dtype) / 2**24


def mix_bits(values: Tensor) -> Tensor:
    """Hash 64-bit integers: their upper bits are as good as random."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        shifted = (values >> shift) & ((1 << (64 - shift)) - 1)
        values = (values ^ shifted) * factor
    return values


def coin(seed: int, position_T: Tensor) -> Tensor:
    """Return True for about half of the tokens at these global positions, whatever host they are on."""
    return mix_bits(_spread(position_T, -7046029254386353131) + seed) < 0


def _spread(index: Tensor, factor: int) -> Tensor:
    """Return the product of indices with a factor of 64 bits.

    A compiled arange is computed in 32 bits, and so is its product, where such a factor is an error.
    An operation on bits ends that: its result has 64 bits."""
    return (index ^ 0) * factor
