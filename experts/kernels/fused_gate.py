"""The gate's work in fused kernels: its logits, and from them the choice of experts with its weights and losses. Like those of
``fused``, which says when they can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.kernels.fused import Tile, launch, like, parts, register, tile

if TYPE_CHECKING:
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    tl = None  # until the first launch


def gate_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``F.linear(x_TD.float(), weight_ED.float())`` for two tensors in bf16, without fp32 copies: products of bf16 are exact
    in fp32, where they are summed. Backward: the incoming gradient goes as two bf16 parts, together 16 bits of it."""
    if x_TD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        raise TypeError(
            f"tokens are {x_TD.dtype}, the gate's weights {weight_ED.dtype}; bf16 was needed for both"
        )
    result: Tensor = _Logits.apply(x_TD, weight_ED)  # pyright: ignore[reportAssignmentType]
    return result


def choose(
    logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and experts of each token, the largest first, the balance and the z loss: with
    ``probabilities_TE = logits_TE.softmax(-1)``

    - ``weights_TK, experts_TK = probabilities_TE.topk(top_k)``; to ``normalise`` is ``weights_TK / weights_TK.sum(-1, keepdim=True)``
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
        return _ops.logits_backward(grads[0], *ctx.saved_tensors)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights_TK, experts_TK, losses = _ops.choose(logits_TE, share_E, top_k, normalise)
        ctx.save_for_backward(logits_TE, share_E, experts_TK)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK, losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _ops.choose_backward(grads[0], grads[2], *ctx.saved_tensors, ctx.normalise), None, None, None


def _logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


def _logits_backward(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    tokens, experts = grad_TE.shape
    parts_TE = x_TD.new_empty(tokens, 2 * experts)
    high_TE, low_TE = parts_TE.chunk(2, dim=1)
    high_TE.copy_(grad_TE)
    torch.sub(grad_TE, high_TE, out=low_TE)
    d_weight_ED = torch.mm(parts_TE.t(), x_TD, out_dtype=torch.float32).view(2, experts, -1).sum(0)
    return torch.mm(parts_TE, weight_ED.repeat(2, 1)), d_weight_ED.to(weight_ED.dtype)


def _choose(logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits_TE, share_E = logits_TE.contiguous(), share_E.contiguous()
    (tokens, experts), shape = logits_TE.shape, _tile_of_experts(logits_TE)
    weights_TK = logits_TE.new_empty(tokens, top_k)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    losses_2T = logits_TE.new_empty(2, tokens)
    outputs = (weights_TK, experts_TK, losses_2T, tokens)
    constants = {"E": experts, "K": top_k, "CHOICES": 1 << (top_k - 1).bit_length(), "NORMALISE": normalise}
    launch(_choose_kernel, shape, (parts(tokens, shape.rows), 1), logits_TE, share_E, *outputs, **constants)
    return weights_TK, experts_TK, losses_2T.sum(1)


def _choose_backward(
    d_weights_TK: Tensor,
    d_losses: Tensor,
    logits_TE: Tensor,
    share_E: Tensor,
    experts_TK: Tensor,
    normalise: bool,
) -> Tensor:
    given = [part.contiguous() for part in (d_weights_TK, d_losses, logits_TE, share_E, experts_TK)]
    (tokens, experts), shape = logits_TE.shape, _tile_of_experts(logits_TE)
    d_logits_TE = torch.empty_like(given[2])
    constants = {"E": experts, "K": experts_TK.shape[1], "NORMALISE": normalise}
    launch(
        _choose_backward_kernel,
        shape,
        (parts(tokens, shape.rows), 1),
        *given,
        d_logits_TE,
        tokens,
        **constants,
    )
    return d_logits_TE


def _tile_of_experts(logits_TE: Tensor) -> Tile:
    return tile(
        logits_TE.shape[1], 1 << 16
    )  # a token's experts are compared with each other: all in one program


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
    """Takes the largest K times. What is no number counts as larger than all, as in torch; ties go to the first expert."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    there, real = token < tokens, (expert < E)[None, :]
    logit = tl.load(
        logits + token[:, None] * E + expert[None, :], mask=there[:, None] & real, other=float("-inf")
    )
    logit = tl.where(there[:, None], logit, 0.0)
    peak = tl.max(logit, axis=1)
    power = tl.where(real, tl.exp(logit - peak[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    probability = power / total[:, None]
    left = tl.where(real, tl.where(probability == probability, probability, 2.0), -2.0)
    weight = tl.zeros((ROWS, CHOICES), dtype=tl.float32)
    index = tl.zeros((ROWS, CHOICES), dtype=tl.int64)
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1)
        taken = expert[None, :] == best[:, None]
        here = (choice == k)[None, :]
        weight = tl.where(here, tl.sum(tl.where(taken, probability, 0.0), axis=1)[:, None], weight)
        index = tl.where(here, best[:, None].to(tl.int64), index)
        left = tl.where(taken, -1.0, left)
    if NORMALISE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    place = token[:, None] * K + choice[None, :]
    within = there[:, None] & (choice < K)[None, :]
    tl.store(weights + place, weight, mask=within)
    tl.store(chosen + place, index, mask=within)
    used = tl.load(share + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(losses + token, tl.sum(probability * used[None, :], axis=1), mask=there)
    level = peak + tl.log(total)
    tl.store(losses + tokens + token, level * level, mask=there)


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
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    there, real = token < tokens, (expert < E)[None, :]
    logit = tl.load(
        logits + token[:, None] * E + expert[None, :], mask=there[:, None] & real, other=float("-inf")
    )
    logit = tl.where(there[:, None], logit, 0.0)
    peak = tl.max(logit, axis=1)
    power = tl.where(real, tl.exp(logit - peak[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    probability = power / total[:, None]
    picked = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # gradients of the weights, where their experts are
    taken = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # probabilities of the chosen, zero elsewhere
    for k in tl.static_range(K):
        best = tl.load(chosen + token * K + k, mask=there, other=0)
        grad = tl.load(d_weights + token * K + k, mask=there, other=0.0)
        same = expert[None, :] == best[:, None]
        picked = tl.where(same, grad[:, None], picked)
        taken = tl.where(same, probability, taken)
    if NORMALISE:
        sum_taken = tl.sum(taken, axis=1)[:, None]
        mean = tl.sum(picked * taken, axis=1)[:, None] / sum_taken
        picked = tl.where(taken > 0, (picked - mean) / sum_taken, 0.0)
    used = tl.load(share + expert, mask=expert < E, other=0.0).to(tl.float32)
    d_probability = picked + tl.load(d_losses) * used[None, :]
    level = peak + tl.log(total)
    d_level = 2.0 * level * tl.load(d_losses + 1)
    inner = tl.sum(probability * d_probability, axis=1)
    d_logit = probability * (d_probability - inner[:, None] + d_level[:, None])
    tl.store(d_logits + token[:, None] * E + expert[None, :], d_logit, mask=there[:, None] & real)


register(
    "logits(Tensor x_TD, Tensor weight_ED) -> Tensor",
    _logits,
    lambda x, weight: like((x.shape[0], weight.shape[0]), x, torch.float32),
)
register(
    "logits_backward(Tensor grad_TE, Tensor x_TD, Tensor weight_ED) -> (Tensor, Tensor)",
    _logits_backward,
    lambda _, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
)
register(
    "choose(Tensor logits_TE, Tensor share_E, int top_k, bool normalise) -> (Tensor, Tensor, Tensor)",
    _choose,
    lambda x, _, k, __: (like((x.shape[0], k), x), like((x.shape[0], k), x, torch.int64), like((2,), x)),
)
register(
    "choose_backward(Tensor d_TK, Tensor d_losses, Tensor logits_TE, Tensor share_E, Tensor experts_TK, bool normalise) -> Tensor",
    _choose_backward,
    lambda _, __, logits, *___: torch.empty_like(logits),
)
_ops: Any = torch.ops.experts
