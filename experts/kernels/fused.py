"""What a layer does besides its products, each in one Triton kernel: choosing experts, copying rows out to them, summing rows
up again, and the weighted SwiGLU between an expert's two products. Such work only moves memory, so it is written to move
it once; sums run in a fixed order, without atomics, and the host never waits.

Needed are a CUDA device and Triton, which comes with torch there and is imported at the first launch. ``available`` says
whether they can be had; each function names its equivalent in plain torch. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    tl = None  # until the first launch

_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(x: Tensor | None = None) -> bool:
    """Whether the kernels can be used: for this tensor, or at all. Sums are taken in fp32, so fp64 stays with plain torch."""
    if x is None:
        return _TRITON and torch.cuda.is_available()
    return _TRITON and x.is_cuda and x.dtype in _DTYPES


def gate_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``F.linear(x_TD.float(), weight_ED.float())`` for two tensors in bf16, without fp32 copies: products of bf16 are exact
    in fp32, where they are summed. Backward: the incoming gradient goes as two bf16 parts, together 16 bits of it."""
    if x_TD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        raise TypeError(f"tokens are {x_TD.dtype}, the gate's weights {weight_ED.dtype}; bf16 was needed for both")
    result: Tensor = _Logits.apply(x_TD, weight_ED)  # pyright: ignore[reportAssignmentType]
    return result


def choose(logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and experts of each token, the largest first, the balance and the z loss: with
    ``probabilities_TE = logits_TE.softmax(-1)``

    - ``weights_TK, experts_TK = probabilities_TE.topk(top_k)``; to ``normalise`` is ``weights_TK / weights_TK.sum(-1, keepdim=True)``
    - ``(probabilities_TE * share_E).sum()`` and ``logits_TE.logsumexp(-1).square().sum()``

    Only the logits and the choice are kept for the backward pass. ``share_E`` gets no gradient."""
    result: Any = _Choose.apply(logits_TE, share_E, top_k, normalise)
    weights_TK, experts_TK, losses = result
    return weights_TK, experts_TK, losses[0], losses[1]


def gather_rows(x_TD: Tensor, token_R: Tensor, back_TK: Tensor) -> Tensor:
    """``x_TD[token_R]``. The two indices must tell the same: ``token_R[back_TK[t, k]] == t``, each row named once, -1 for
    a choice that has no row. It is ``back_TK`` that is followed, so that a token is read once: rows it does not name are
    not written.

    Backward: ``torch.where(back_TK[..., None] >= 0, grad_RD[back_TK], 0).sum(1)``, summed in fp32 in the order of K."""
    result: Tensor = _Gather.apply(x_TD, token_R, back_TK)  # pyright: ignore[reportAssignmentType]
    return result


def sum_rows(rows_RD: Tensor, back_TK: Tensor, token_R: Tensor) -> Tensor:
    """``torch.where(back_TK[..., None] >= 0, rows_RD[back_TK], 0).sum(1)``, summed in fp32 in the order of K: the transpose
    of ``gather_rows``, with the same indices. A token without any row gets zeros. Backward: ``grad_TD[token_R]``."""
    result: Tensor = _Sum.apply(rows_RD, back_TK, token_R)  # pyright: ignore[reportAssignmentType]
    return result


def weighted_swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    """``(F.silu(gate) * value * weights_R[:, None]).to(hidden.dtype)`` of ``gate, value = hidden_RH.float().chunk(2, -1)``.
    Only what comes in is kept for the backward pass; the gradient of a weight is a sum over its row, in fp32."""
    result: Tensor = _Swiglu.apply(hidden_RH, weights_R)  # pyright: ignore[reportAssignmentType]
    return result


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
    def forward(ctx: Any, logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
        weights_TK, experts_TK, losses = _ops.choose(logits_TE, share_E, top_k, normalise)
        ctx.save_for_backward(logits_TE, share_E, experts_TK)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK, losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _ops.choose_backward(grads[0], grads[2], *ctx.saved_tensors, ctx.normalise), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, back_TK: Tensor) -> Tensor:
        ctx.save_for_backward(back_TK)
        return _ops.copy_rows(x_TD, back_TK, token_R.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back_TK,) = ctx.saved_tensors
        return _ops.sum_rows(grads[0], back_TK), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, back_TK: Tensor, token_R: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(back_TK)
        ctx.rows = rows_RD.shape[0]
        return _ops.sum_rows(rows_RD, back_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back_TK,) = ctx.saved_tensors
        return _ops.copy_rows(grads[0], back_TK, ctx.rows), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RH, weights_R)
        return _ops.swiglu(hidden_RH, weights_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden_RH, weights_R = ctx.saved_tensors
        return _ops.swiglu_backward(grads[0], hidden_RH, weights_R)


@dataclass(frozen=True)
class Tile:
    """What one program works on, and with how many warps."""

    rows: int
    columns: int
    warps: int


def tile(width: int, most: int) -> Tile:
    """Eight elements a thread (16 bytes of bf16); of short rows a program takes several. At most 1,024 columns
    where rows are copied or summed and 2,048 in the SwiGLU were the fastest on an H200: 3.5 to 4.3 TB/s, a plain copy 4.2."""
    columns = min(1 << max(width - 1, 15).bit_length(), most)
    return Tile(max(1, 1024 // columns), columns, max(4, columns // 256))


def _launch(kernel: Callable[..., None], shape: Tile, grid: tuple[int, int], *arguments: Any, **constants: int) -> None:
    if grid[0] and grid[1]:
        with torch.cuda.device_of(arguments[0]):
            _compiled(kernel)[grid](*arguments, **constants, ROWS=shape.rows, COLUMNS=shape.columns, num_warps=shape.warps)


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    global tl
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return triton.jit(kernel)


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
    _launch(_choose_kernel, shape, (_parts(tokens, shape.rows), 1), logits_TE, share_E, *outputs, **constants)
    return weights_TK, experts_TK, losses_2T.sum(1)


def _choose_backward(
    d_weights_TK: Tensor, d_losses: Tensor, logits_TE: Tensor, share_E: Tensor, experts_TK: Tensor, normalise: bool
) -> Tensor:
    given = [part.contiguous() for part in (d_weights_TK, d_losses, logits_TE, share_E, experts_TK)]
    (tokens, experts), shape = logits_TE.shape, _tile_of_experts(logits_TE)
    d_logits_TE = torch.empty_like(given[2])
    constants = {"E": experts, "K": experts_TK.shape[1], "NORMALISE": normalise}
    _launch(_choose_backward_kernel, shape, (_parts(tokens, shape.rows), 1), *given, d_logits_TE, tokens, **constants)
    return d_logits_TE


def _tile_of_experts(logits_TE: Tensor) -> Tile:
    return tile(logits_TE.shape[1], 1 << 16)  # a token's experts are compared with each other: all in one program


def _copy_rows(x_TD: Tensor, back_TK: Tensor, rows: int) -> Tensor:
    x_TD, back_TK = x_TD.contiguous(), back_TK.contiguous()
    (tokens, width), shape = x_TD.shape, tile(x_TD.shape[1], 1024)
    rows_RD = x_TD.new_empty(rows, width)
    grid = (_parts(tokens, shape.rows), _parts(width, shape.columns))
    _launch(_copy_kernel, shape, grid, x_TD, back_TK, rows_RD, tokens, D=width, K=back_TK.shape[1])
    return rows_RD


def _sum_rows(rows_RD: Tensor, back_TK: Tensor) -> Tensor:
    rows_RD, back_TK = rows_RD.contiguous(), back_TK.contiguous()
    (tokens, top_k), width = back_TK.shape, rows_RD.shape[1]
    shape, x_TD = tile(width, 1024), rows_RD.new_empty(tokens, width)
    grid = (_parts(tokens, shape.rows), _parts(width, shape.columns))
    _launch(_sum_kernel, shape, grid, rows_RD, back_TK, x_TD, tokens, D=width, K=top_k)
    return x_TD


def _swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    hidden_RH, weights_R = hidden_RH.contiguous(), weights_R.contiguous()
    rows, width = hidden_RH.shape[0], hidden_RH.shape[1] // 2
    shape, made_RH = tile(width, 2048), hidden_RH.new_empty(rows, width)
    grid = (_parts(rows, shape.rows), _parts(width, shape.columns))
    _launch(_swiglu_kernel, shape, grid, hidden_RH, weights_R, made_RH, rows, H=width)
    return made_RH


def _swiglu_backward(grad_RH: Tensor, hidden_RH: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    grad_RH, hidden_RH, weights_R = grad_RH.contiguous(), hidden_RH.contiguous(), weights_R.contiguous()
    rows, width = grad_RH.shape
    shape = tile(width, 2048)
    d_hidden_RH, d_weights_R = torch.empty_like(hidden_RH), torch.empty_like(weights_R)
    tensors = (grad_RH, hidden_RH, weights_R, d_hidden_RH, d_weights_R)
    _launch(_swiglu_backward_kernel, shape, (_parts(rows, shape.rows), 1), *tensors, rows, H=width)
    return d_hidden_RH, d_weights_R


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


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
    logit = tl.load(logits + token[:, None] * E + expert[None, :], mask=there[:, None] & real, other=float("-inf"))
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
    logit = tl.load(logits + token[:, None] * E + expert[None, :], mask=there[:, None] & real, other=float("-inf"))
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


def _copy_kernel(x, back, out, tokens, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """Each token is read once and written to each of its rows."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    values = tl.load(x + token[:, None] * D + column[None, :], mask=inside)
    for k in tl.static_range(K):
        row = tl.load(back + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        tl.store(out + row[:, None] * D + column[None, :], values, mask=inside & (row >= 0)[:, None])


def _sum_kernel(rows, back, out, tokens, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(back + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        total += tl.load(rows + row[:, None] * D + column[None, :], mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def _swiglu_kernel(hidden, weights, out, rows, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    place = hidden + row[:, None] * (2 * H) + column[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(place + H, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    made = gate * tl.sigmoid(gate) * value * weight[:, None]
    tl.store(out + row[:, None] * H + column[None, :], made.to(out.dtype.element_ty), mask=inside)


def _swiglu_backward_kernel(
    grads, hidden, weights, d_hidden, d_weights, rows, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """A program has its rows to itself, so the gradient of a weight needs no second pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, H, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < H)[None, :]
        place = row[:, None] * (2 * H) + column[None, :]
        grad = tl.load(grads + row[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(hidden + place + H, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        d_weight += grad * gate * sigmoid * value
        grad *= weight[:, None]
        d_gate = grad * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(d_hidden + place, d_gate.to(d_hidden.dtype.element_ty), mask=inside)
        tl.store(d_hidden + place + H, (grad * gate * sigmoid).to(d_hidden.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, tl.sum(d_weight, axis=1).to(d_weights.dtype.element_ty), mask=row < rows)


def _like(shape: tuple[int, ...], x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


# Operators of torch, so that tracing and compiling see the shapes of their results and not their insides.
_library = torch.library.Library("experts", "FRAGMENT")
for _schema, _compute, _shapes in (
    (
        "logits(Tensor x_TD, Tensor weight_ED) -> Tensor",
        _logits,
        lambda x, weight: _like((x.shape[0], weight.shape[0]), x, torch.float32),
    ),
    (
        "logits_backward(Tensor grad_TE, Tensor x_TD, Tensor weight_ED) -> (Tensor, Tensor)",
        _logits_backward,
        lambda _, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
    ),
    (
        "choose(Tensor logits_TE, Tensor share_E, int top_k, bool normalise) -> (Tensor, Tensor, Tensor)",
        _choose,
        lambda x, _, k, __: (_like((x.shape[0], k), x), _like((x.shape[0], k), x, torch.int64), _like((2,), x)),
    ),
    (
        "choose_backward(Tensor d_TK, Tensor d_losses, Tensor logits_TE, Tensor share_E, Tensor experts_TK, bool normalise) -> Tensor",
        _choose_backward,
        lambda _, __, logits, *___: torch.empty_like(logits),
    ),
    (
        "copy_rows(Tensor x_TD, Tensor back_TK, SymInt rows) -> Tensor",
        _copy_rows,
        lambda x, _, rows: _like((rows, x.shape[1]), x),
    ),
    (
        "sum_rows(Tensor rows_RD, Tensor back_TK) -> Tensor",
        _sum_rows,
        lambda rows, back: _like((back.shape[0], rows.shape[1]), rows),
    ),
    (
        "swiglu(Tensor hidden_RH, Tensor weights_R) -> Tensor",
        _swiglu,
        lambda hidden, _: _like((hidden.shape[0], hidden.shape[1] // 2), hidden),
    ),
    (
        "swiglu_backward(Tensor grad_RH, Tensor hidden_RH, Tensor weights_R) -> (Tensor, Tensor)",
        _swiglu_backward,
        lambda _, hidden, weights: (torch.empty_like(hidden), torch.empty_like(weights)),
    ),
):
    _name = _library.define(_schema)
    _library.impl(_name, _compute, "CUDA")
    _library.impl(_name, _shapes, "Meta")
_ops: Any = torch.ops.experts
