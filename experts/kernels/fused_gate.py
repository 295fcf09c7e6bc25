"""Fused kernels of the gate: its logits, and the choice of experts with weights and losses.

``launching.available`` tells whether they work. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.kernels.launching import Tile, launch, num_blocks, refuse_second_derivative, register, tile

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch


def gate_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return ``F.linear(x_TD.float(), weight_ED.float())`` for bf16 tensors, without fp32 copies.

    Products of bf16 numbers are exact in fp32, where they are summed. In the backward pass the
    incoming gradient is split into two bf16 parts, which together hold 16 bits of it."""
    if x_TD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        raise TypeError(
            f"tokens are {x_TD.dtype}, the gate's weights {weight_ED.dtype}; bf16 was needed for both"
        )
    result: Tensor = _Logits.apply(x_TD, weight_ED)
    return result


def choose(
    logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights and experts of each token, the largest first, the balance loss and the z loss.

    With ``probabilities_TE = logits_TE.softmax(-1)`` they are:

    - ``weights_TK, experts_TK = probabilities_TE.topk(top_k)``, and with ``normalise`` then
      ``weights_TK / weights_TK.sum(-1, keepdim=True)``
    - ``(probabilities_TE * share_E).sum()`` and ``logits_TE.logsumexp(-1).square().sum()``

    Only the logits and the choice are kept for the backward pass. ``share_E`` gets no gradient."""
    result: Any = _Choose.apply(logits_TE, share_E, top_k, normalise)
    weights_TK, experts_TK, losses = result
    return weights_TK, experts_TK, losses[0], losses[1]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _ops.logits(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative()
        return _ops.logits_backward(grads[0], *ctx.saved_tensors)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        share_E: Tensor,
        top_k: int,
        normalise: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights_TK, experts_TK, losses = _ops.choose(logits_TE, share_E, top_k, normalise)
        ctx.save_for_backward(logits_TE, share_E, experts_TK)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK, losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        d_weights_TK, _, d_losses = grads
        d_logits_TE = _ops.choose_backward(d_weights_TK, d_losses, *ctx.saved_tensors, ctx.normalise)
        return d_logits_TE, None, None, None


def _logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


def _logits_backward(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    tokens, experts = grad_TE.shape
    # High and low parts lie side by side, so that one bf16 product takes both.
    parts_TE = x_TD.new_empty(tokens, 2 * experts)
    high_TE, low_TE = parts_TE.chunk(2, dim=1)
    high_TE.copy_(grad_TE)
    torch.sub(grad_TE, high_TE, out=low_TE)
    d_weight_ED = torch.mm(parts_TE.t(), x_TD, out_dtype=torch.float32).view(2, experts, -1).sum(0)
    return torch.mm(parts_TE, weight_ED.repeat(2, 1)), d_weight_ED.to(weight_ED.dtype)


def _choose(
    logits_TE: Tensor,
    share_E: Tensor,
    top_k: int,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    share_E = share_E.contiguous()
    tokens, experts = logits_TE.shape
    shape = _row_tile(experts)
    weights_TK = logits_TE.new_empty(tokens, top_k)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    losses_2T = logits_TE.new_empty(2, tokens)
    tensors = (logits_TE, share_E, weights_TK, experts_TK, losses_2T)
    # Triton's blocks have sizes in powers of two.
    constants = {"E": experts, "K": top_k, "CHOICES": 1 << (top_k - 1).bit_length(), "NORMALISE": normalise}
    grid = (num_blocks(tokens, shape.rows), 1)
    launch(_choose_kernel, shape, grid, *tensors, tokens, **constants)
    return weights_TK, experts_TK, losses_2T.sum(1)


def _choose_backward(
    d_weights_TK: Tensor,
    d_losses: Tensor,
    logits_TE: Tensor,
    share_E: Tensor,
    experts_TK: Tensor,
    normalise: bool,
) -> Tensor:
    inputs = [tensor.contiguous() for tensor in (d_weights_TK, d_losses, logits_TE, share_E, experts_TK)]
    tokens, experts = logits_TE.shape
    shape = _row_tile(experts)
    d_logits_TE = logits_TE.new_empty(tokens, experts)
    constants = {"E": experts, "K": experts_TK.shape[1], "NORMALISE": normalise}
    grid = (num_blocks(tokens, shape.rows), 1)
    launch(_choose_backward_kernel, shape, grid, *inputs, d_logits_TE, tokens, **constants)
    return d_logits_TE


def _row_tile(experts: int) -> Tile:
    """Return a tile with all experts of a token, which are compared with each other."""
    return tile(experts, 1 << 16)


def _choose_kernel(
    logits,
    share,
    weights,
    chosen,
    losses,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the softmax of each token, then take the largest probability K times.

    NaN counts as the largest, as in torch; ties go to the first expert."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    in_batch, is_expert = token < tokens, (expert < E)[None, :]
    logit = tl.load(
        logits + token[:, None] * E + expert[None, :], mask=in_batch[:, None] & is_expert, other=float("-inf")
    )
    # Tokens past the batch get zeros: the difference of two infinities would be NaN.
    logit = tl.where(in_batch[:, None], logit, 0.0)
    # The peak is subtracted so that no power overflows. Columns past the last expert have no power.
    peak = tl.max(logit, axis=1)
    power = tl.where(is_expert, tl.exp(logit - peak[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    probability = power / total[:, None]
    # ``left`` ranks the candidates: 2 for NaN, above any probability; -1 for an expert that was taken; -2 for
    # a column past the last expert.
    left = tl.where(is_expert, tl.where(probability == probability, probability, 2.0), -2.0)
    weight = tl.zeros((ROWS, CHOICES), dtype=tl.float32)
    index = tl.zeros((ROWS, CHOICES), dtype=tl.int64)
    # Registers have no index at run time: masks pick the chosen column, and fill place k of the results.
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1)
        taken = expert[None, :] == best[:, None]
        is_kth = (choice == k)[None, :]
        weight = tl.where(is_kth, tl.sum(tl.where(taken, probability, 0.0), axis=1)[:, None], weight)
        index = tl.where(is_kth, best[:, None].to(tl.int64), index)
        left = tl.where(taken, -1.0, left)
    if NORMALISE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    offset = token[:, None] * K + choice[None, :]
    inside = in_batch[:, None] & (choice < K)[None, :]
    tl.store(weights + offset, weight, mask=inside)
    tl.store(chosen + offset, index, mask=inside)
    # Losses are stored per token and summed afterwards in a fixed order: atomics would have none.
    used = tl.load(share + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(losses + token, tl.sum(probability * used[None, :], axis=1), mask=in_batch)
    level = peak + tl.log(total)  # the logsumexp of the logits, whose square is the z loss
    tl.store(losses + tokens + token, level * level, mask=in_batch)


def _choose_backward_kernel(
    d_weights,
    d_losses,
    logits,
    share,
    chosen,
    d_logits,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the softmax again, then the gradient of the logits from those of weights and losses."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    in_batch, is_expert = token < tokens, (expert < E)[None, :]
    logit = tl.load(
        logits + token[:, None] * E + expert[None, :], mask=in_batch[:, None] & is_expert, other=float("-inf")
    )
    logit = tl.where(in_batch[:, None], logit, 0.0)
    peak = tl.max(logit, axis=1)
    power = tl.where(is_expert, tl.exp(logit - peak[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    probability = power / total[:, None]
    # Both are zero for experts that were not chosen: the gradient of each weight in the column of its expert,
    # and the probability of each chosen expert.
    picked = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    taken = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.load(chosen + token * K + k, mask=in_batch, other=0)
        grad = tl.load(d_weights + token * K + k, mask=in_batch, other=0.0)
        same = expert[None, :] == best[:, None]
        picked = tl.where(same, grad[:, None], picked)
        taken = tl.where(same, probability, taken)
    # With w_k = p_k / sum(p), the gradient of p_k is (d_w_k - sum(d_w * w)) / sum(p).
    if NORMALISE:
        sum_taken = tl.sum(taken, axis=1)[:, None]
        mean = tl.sum(picked * taken, axis=1)[:, None] / sum_taken
        picked = tl.where(taken > 0, (picked - mean) / sum_taken, 0.0)
    used = tl.load(share + expert, mask=expert < E, other=0.0).to(tl.float32)
    d_probability = picked + tl.load(d_losses) * used[None, :]
    level = peak + tl.log(total)
    d_level = 2.0 * level * tl.load(d_losses + 1)
    # The softmax gives p * (d_p - sum(p * d_p)); the gradient of the logsumexp is p.
    inner = tl.sum(probability * d_probability, axis=1)
    d_logit = probability * (d_probability - inner[:, None] + d_level[:, None])
    tl.store(d_logits + token[:, None] * E + expert[None, :], d_logit, mask=in_batch[:, None] & is_expert)


register(
    "logits(Tensor x_TD, Tensor weight_ED) -> Tensor",
    _logits,
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32),
)
register(
    "logits_backward(Tensor grad_TE, Tensor x_TD, Tensor weight_ED) -> (Tensor, Tensor)",
    _logits_backward,
    lambda _, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
)
register(
    "choose(Tensor logits_TE, Tensor share_E, int top_k, bool normalise) -> (Tensor, Tensor, Tensor)",
    _choose,
    lambda logits, _, top_k, __: (
        logits.new_empty((logits.shape[0], top_k)),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int64),
        logits.new_empty((2,)),
    ),
)
register(
    "choose_backward("
    "Tensor d_weights_TK, Tensor d_losses, Tensor logits_TE, Tensor share_E, Tensor experts_TK, "
    "bool normalise"
    ") -> Tensor",
    _choose_backward,
    lambda _, __, logits, *___: torch.empty_like(logits),
)
_ops: Any = torch.ops.experts
