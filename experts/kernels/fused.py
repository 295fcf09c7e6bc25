"""What a layer does besides its products, each in one Triton kernel: copying rows out to the experts, summing rows up again,
and the weighted SwiGLU between an expert's two products; ``fused_gate`` has those of the gate. Such work only moves memory,
so it is written to move it once; sums run in a fixed order, without atomics, and the host never waits.

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


def launch(
    kernel: Callable[..., None], shape: Tile, grid: tuple[int, int], *arguments: Any, **constants: int
) -> None:
    if grid[0] and grid[1]:
        with torch.cuda.device_of(arguments[0]):
            _compiled(kernel)[grid](
                *arguments, **constants, ROWS=shape.rows, COLUMNS=shape.columns, num_warps=shape.warps
            )


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language  # pyright: ignore[reportMissingImports]

    kernel.__globals__["tl"] = triton.language  # of the file that the kernel is in
    return triton.jit(kernel)


def _copy_rows(x_TD: Tensor, back_TK: Tensor, rows: int) -> Tensor:
    x_TD, back_TK = x_TD.contiguous(), back_TK.contiguous()
    (tokens, width), shape = x_TD.shape, tile(x_TD.shape[1], 1024)
    rows_RD = x_TD.new_empty(rows, width)
    grid = (parts(tokens, shape.rows), parts(width, shape.columns))
    launch(_copy_kernel, shape, grid, x_TD, back_TK, rows_RD, tokens, D=width, K=back_TK.shape[1])
    return rows_RD


def _sum_rows(rows_RD: Tensor, back_TK: Tensor) -> Tensor:
    rows_RD, back_TK = rows_RD.contiguous(), back_TK.contiguous()
    (tokens, top_k), width = back_TK.shape, rows_RD.shape[1]
    shape, x_TD = tile(width, 1024), rows_RD.new_empty(tokens, width)
    grid = (parts(tokens, shape.rows), parts(width, shape.columns))
    launch(_sum_kernel, shape, grid, rows_RD, back_TK, x_TD, tokens, D=width, K=top_k)
    return x_TD


def _swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    hidden_RH, weights_R = hidden_RH.contiguous(), weights_R.contiguous()
    rows, width = hidden_RH.shape[0], hidden_RH.shape[1] // 2
    shape, made_RH = tile(width, 2048), hidden_RH.new_empty(rows, width)
    grid = (parts(rows, shape.rows), parts(width, shape.columns))
    launch(_swiglu_kernel, shape, grid, hidden_RH, weights_R, made_RH, rows, H=width)
    return made_RH


def _swiglu_backward(grad_RH: Tensor, hidden_RH: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    grad_RH, hidden_RH, weights_R = grad_RH.contiguous(), hidden_RH.contiguous(), weights_R.contiguous()
    rows, width = grad_RH.shape
    shape = tile(width, 2048)
    d_hidden_RH, d_weights_R = torch.empty_like(hidden_RH), torch.empty_like(weights_R)
    tensors = (grad_RH, hidden_RH, weights_R, d_hidden_RH, d_weights_R)
    launch(_swiglu_backward_kernel, shape, (parts(rows, shape.rows), 1), *tensors, rows, H=width)
    return d_hidden_RH, d_weights_R


def parts(whole: int, part: int) -> int:
    return -(-whole // part)


def _copy_kernel(
    x, back, out, tokens, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """Each token is read once and written to each of its rows."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    values = tl.load(x + token[:, None] * D + column[None, :], mask=inside)
    for k in tl.static_range(K):
        row = tl.load(back + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        tl.store(out + row[:, None] * D + column[None, :], values, mask=inside & (row >= 0)[:, None])


def _sum_kernel(
    rows, back, out, tokens, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(back + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        total += tl.load(
            rows + row[:, None] * D + column[None, :], mask=inside & (row >= 0)[:, None], other=0.0
        ).to(tl.float32)
    tl.store(out + token[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def _swiglu_kernel(
    hidden, weights, out, rows, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
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
    grads,
    hidden,
    weights,
    d_hidden,
    d_weights,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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


def like(shape: tuple[int, ...], x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


_library = torch.library.Library("experts", "FRAGMENT")


def register(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """As an operator of torch, so that tracing and compiling see the shapes of its results and not its insides."""
    name = _library.define(schema)
    _library.impl(name, compute, "CUDA")
    _library.impl(name, shapes, "Meta")


register(
    "copy_rows(Tensor x_TD, Tensor back_TK, SymInt rows) -> Tensor",
    _copy_rows,
    lambda x, _, rows: like((rows, x.shape[1]), x),
)
register(
    "sum_rows(Tensor rows_RD, Tensor back_TK) -> Tensor",
    _sum_rows,
    lambda rows, back: like((back.shape[0], rows.shape[1]), rows),
)
register(
    "swiglu(Tensor hidden_RH, Tensor weights_R) -> Tensor",
    _swiglu,
    lambda hidden, _: like((hidden.shape[0], hidden.shape[1] // 2), hidden),
)
register(
    "swiglu_backward(Tensor grad_RH, Tensor hidden_RH, Tensor weights_R) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda _, hidden, weights: (torch.empty_like(hidden), torch.empty_like(weights)),
)
_ops: Any = torch.ops.experts
