"""Cross-entropy of an output layer over a large vocabulary, in chunks of tokens.

The logits of all tokens are never in memory at once: those of a chunk give its losses and, at once, the
gradients of its hidden states and of the output layer.

A vocabulary such as 50,257 gets rows of zeros, so that rows of logits begin at multiples of 16 bytes: on an
H200 products in bf16 take 5 to 7 times as long without, in tf32 2 to 3 times (``unaligned`` in
``plan/cost/devices.json``). So it is on any device: a trace on a CPU finds the products of a GPU.

Shapes: T tokens, C tokens of a chunk, D width, V vocabulary, P vocabulary with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from experts.kernels.autocast import without_autocast
from experts.moe.bank import computing_dtype
from orchestrator.tasks.cross_entropy import held_bytes, loss_and_gradient, wide_dtype

LARGE_LOGITS = 2**22
"""Logits of a sample from which on chunks are used. They save memory, and on a GPU the loss is one kernel.

It does not depend on the number of samples, so that the memory of a plan grows evenly with it."""
CHUNK_LOGITS = 2**27
NO_LABEL = -100
"""The target of a token that has none."""
_ROW_MULTIPLE = 128  # of the tokens of a chunk, for full tiles of its products
_ALIGNMENT = 16  # bytes
_COLUMN_MULTIPLE = 64
"""The vocabulary is filled up with rows of zeros to a multiple of this: 64 numbers of two bytes fill a cache
line."""


_GRADIENT_FLOP: ContextVar[int] = ContextVar("gradient_flop", default=0)


@contextmanager
def counting_gradient_flop() -> Iterator[Callable[[], int]]:
    """Count the FLOP of gradients that forward passes compute together with their losses."""
    before = _GRADIENT_FLOP.get()
    yield lambda: _GRADIENT_FLOP.get() - before


@dataclass
class LogitMemory:
    """Bytes that losses in chunks hold for the logits of their tokens."""

    whole: float = 0.0
    """If all tokens of a pass were one chunk."""
    chunk: float = 0.0
    """For a full chunk: a loss never holds more."""


class MemoryWatch(Protocol):
    """Watches memory while a loss computes its chunks."""

    computes_logits: bool
    """Whether a chunk's logits are alive, or may be."""

    def record(self, freed: float = 0.0, has_logits: bool = False) -> None:
        """Record what is alive, without ``freed`` bytes."""


_LOGIT_MEMORY: ContextVar[tuple[LogitMemory, MemoryWatch | None] | None] = ContextVar(
    "logit_memory", default=None
)


@contextmanager
def counting_logit_memory(watch: MemoryWatch | None = None) -> Iterator[LogitMemory]:
    """Count the memory of logits that no backward pass needs: autograd does not save it.

    ``watch`` records what else is alive with the logits of a chunk, and nothing while they grow."""
    memory = LogitMemory()
    token = _LOGIT_MEMORY.set((memory, watch))
    try:
        yield memory
    finally:
        _LOGIT_MEMORY.reset(token)


def _count_logits(products_CP: Tensor, held: int, alive: int) -> None:
    """Count a chunk that holds so many bytes at most, of which some are alive already."""
    found = _LOGIT_MEMORY.get()
    if found is None:
        return
    memory, watch = found
    tokens, columns = products_CP.shape
    memory.whole += held
    memory.chunk = max(memory.chunk, held / tokens * _chunk_size(columns))
    if watch is not None:
        watch.record(freed=alive, has_logits=True)


@contextmanager
def _computing_logits() -> Iterator[None]:
    found = _LOGIT_MEMORY.get()
    watch = found[1] if found is not None else None
    if watch is not None:
        watch.computes_logits = True
    yield
    if watch is not None:
        watch.computes_logits = False


class TokenLoss(NamedTuple):
    """The sum of the tokens' losses, and the number of tokens whose best guess is right.

    The number is None in training: it costs a pass over all logits."""

    sum: Tensor
    num_correct: Tensor | None


class LogitTransform(NamedTuple):
    """The function from the output layer's products to logits: a factor, then a soft cap (0 for none)."""

    scale: float = 1.0
    softcap: float = 0.0

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits, in fp32 at least."""
        logits = products.to(wide_dtype(products.dtype))
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


PLAIN = LogitTransform()


def has_large_logits(tokens: int, vocabulary: int) -> bool:
    """Whether the loss of samples of so many tokens is computed in chunks."""
    return tokens * vocabulary >= LARGE_LOGITS


def token_loss(
    hidden_TD: Tensor,
    output_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    ignore: bool = False,
) -> TokenLoss:
    """Return the cross-entropy of the output layer's logits against the targets, as a sum.

    With ``ignore`` targets may be ``NO_LABEL``: such tokens have no loss, and no logits are computed. The
    host waits for the number of the others. Without it each target must be a row of ``output_VD``."""
    dtype = computing_dtype(hidden_TD)
    with without_autocast(hidden_TD):
        if torch.is_grad_enabled():
            apply: Any = _TokenLoss.apply
            total = apply(hidden_TD, output_VD, bias_V, targets_T, dtype, *transform, ignore)
            return TokenLoss(total, None)
        compute = _OPAQUE_VALUES[ignore] if torch.compiler.is_compiling() else _values
        return TokenLoss(*compute(hidden_TD.to(dtype), output_VD, bias_V, targets_T, *transform, ignore))


# --- the loss alone


def _values(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    scale: float,
    softcap: float,
    ignore: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the number of right guesses."""
    transform = LogitTransform(scale, softcap)
    total = hidden_TD.new_zeros((), dtype=wide_dtype(hidden_TD.dtype))
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
    vocabulary = len(output_VD)
    output_PD, bias_P = _padded(output_VD, bias_V, hidden_TD.dtype)
    for rows_C in _chunks(targets_T, len(output_PD), ignore):
        logits_CV = transform(F.linear(hidden_TD[rows_C], output_PD, bias_P)[:, :vocabulary])
        targets_C = targets_T[rows_C]
        num_correct += (logits_CV.argmax(-1) == targets_C).sum()
        total += F.cross_entropy(logits_CV, targets_C, reduction="sum")
    return total, num_correct


def _values_like(hidden_TD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    total = hidden_TD.new_empty((), dtype=wide_dtype(hidden_TD.dtype))
    return total, hidden_TD.new_empty((), dtype=torch.int64)


# --- the loss and its gradients


class _TokenLoss(torch.autograd.Function):
    """Computes the gradients with the loss; the backward pass multiplies them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        output_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float,
        ignore: bool,
    ) -> Tensor:
        # A frozen output layer, as beside adapters, saves a third of the products, and its gradient's memory.
        _, trains_output, trains_bias, *_ = ctx.needs_input_grad
        # A compiler would move the gradients to the backward pass, and keep all logits until then.
        compute = _OPAQUE_GRADIENTS[ignore] if torch.compiler.is_compiling() else _gradients
        total, *gradients = compute(
            hidden_TD.to(dtype),
            output_VD,
            bias_V,
            targets_T,
            scale,
            softcap,
            ignore,
            trains_output,
            trains_bias,
        )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if t is None else _gradient_dtype(t) for t in (hidden_TD, output_VD, bias_V)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        multiplied = [
            (gradient * grads[0]).to(dtype) if needed else None
            for gradient, dtype, needed in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:3], strict=True
            )
        ]
        return *multiplied, None, None, None, None, None


def _gradient_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of a value's gradient: weights stored in bf16 take theirs in fp32.

    The compiler of torch cannot read ``grad_dtype``: compiled code rounds that gradient to bf16."""
    if torch.compiler.is_compiling() or not value.is_leaf:
        return value.dtype
    return value.grad_dtype or value.dtype


def _gradients(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    scale: float,
    softcap: float,
    ignore: bool,
    trains_output: bool,
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients by the hidden states, the output matrix and the bias.

    A gradient that is not trained has no elements."""
    sums = _Sums(*_empty_results(hidden_TD, output_VD, trains_output, trains_bias))
    for result in (sums.total, sums.d_hidden_TD, sums.d_output_VD, sums.d_bias_V):
        result.zero_()
    output_PD, bias_P = _padded(output_VD, bias_V, hidden_TD.dtype)
    layer = _Layer(output_PD, bias_P, len(output_VD), LogitTransform(scale, softcap))
    with _computing_logits():
        for rows_C in _chunks(targets_T, len(output_PD), ignore):
            sums.add(rows_C, hidden_TD, layer, targets_T)
    return sums.total, sums.d_hidden_TD, sums.d_output_VD, sums.d_bias_V


def _gradients_like(
    hidden_TD: Tensor, output_VD: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, trains_output, trains_bias = others
    return _empty_results(hidden_TD, output_VD, trains_output, trains_bias)


def _empty_results(
    hidden_TD: Tensor, output_VD: Tensor, trains_output: bool, trains_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(hidden_TD.dtype)
    vocabulary, width = output_VD.shape
    return (
        hidden_TD.new_empty((), dtype=wide),
        hidden_TD.new_empty(hidden_TD.shape),
        # Chunks are summed in full: each of them is rounded once, as the gradient of all tokens would be.
        hidden_TD.new_empty((vocabulary if trains_output else 0, width), dtype=wide),
        hidden_TD.new_empty(vocabulary if trains_bias else 0, dtype=wide),
    )


@dataclass(frozen=True)
class _Layer:
    """The output layer, its matrix and bias with rows of zeros."""

    output_PD: Tensor
    bias_P: Tensor | None
    vocabulary: int
    transform: LogitTransform

    def loss_and_gradient(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and the gradient of their sum by the products."""
        products_CP = F.linear(hidden_CD, self.output_PD, self.bias_P)
        if self.transform == PLAIN:
            held = held_bytes(products_CP, self.vocabulary)
            _count_logits(products_CP, held, products_CP.nbytes)
            return loss_and_gradient(products_CP, targets_C, self.vocabulary)
        logits_CP = self.transform(products_CP)
        # Before the loss: its gradient may be written in the logits' place.
        scale, softcap = self.transform
        slope = (logits_CP / softcap).square_().neg_().add_(1).mul_(scale) if softcap else scale
        beside_logits = products_CP.nbytes + (slope.nbytes if isinstance(slope, Tensor) else 0)
        # At the end: logits, their gradient, and its product with the slope, which may get another type.
        is_wide = products_CP.dtype == logits_CP.dtype
        multiplied = 3 * logits_CP.nbytes + (0 if is_wide else products_CP.nbytes)
        held = max(held_bytes(logits_CP, self.vocabulary), multiplied)
        _count_logits(products_CP, beside_logits + held, beside_logits + logits_CP.nbytes)
        loss_C, d_logits_CP = loss_and_gradient(logits_CP, targets_C, self.vocabulary)
        return loss_C, (d_logits_CP * slope).to(products_CP.dtype)


@dataclass(frozen=True)
class _Sums:
    """The loss and its gradients over the chunks that are done."""

    total: Tensor
    d_hidden_TD: Tensor
    d_output_VD: Tensor
    d_bias_V: Tensor

    def add(self, rows_C: Tensor | slice, hidden_TD: Tensor, layer: _Layer, targets_T: Tensor) -> None:
        """Add a chunk. Its logits are free again when this returns."""
        hidden_CD = hidden_TD[rows_C]
        loss_C, d_products_CP = layer.loss_and_gradient(hidden_CD, targets_T[rows_C])
        self.total.add_(loss_C.sum())
        trains_output = len(self.d_output_VD) > 0
        _GRADIENT_FLOP.set(
            _GRADIENT_FLOP.get() + 2 * d_products_CP.numel() * hidden_CD.shape[1] * (1 + trains_output)
        )
        self.d_hidden_TD[rows_C] = d_products_CP @ layer.output_PD
        if trains_output:
            self.d_output_VD.add_((d_products_CP.T @ hidden_CD)[: layer.vocabulary])
        if len(self.d_bias_V):
            self.d_bias_V.add_(d_products_CP.sum(0, dtype=self.d_bias_V.dtype)[: layer.vocabulary])


def _padded(output_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the output layer in a type, with so many rows of zeros that rows of its logits are aligned."""
    if len(output_VD) * dtype.itemsize % _ALIGNMENT == 0:
        return output_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
    return _with_zeros(output_VD, dtype), None if bias_V is None else _with_zeros(bias_V, dtype)


def _with_zeros(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in a type with rows of zeros: one copy, where a cast and padding would be two."""
    num_rows = len(rows)
    padded = rows.new_empty(num_rows + -num_rows % _COLUMN_MULTIPLE, *rows.shape[1:], dtype=dtype)
    padded[:num_rows] = rows
    padded[num_rows:] = 0
    return padded


def _chunk_size(columns: int) -> int:
    """Return the tokens of a full chunk."""
    size = CHUNK_LOGITS // columns
    return max(1, size // _ROW_MULTIPLE * _ROW_MULTIPLE or size)


def _chunks(targets_T: Tensor, columns: int, ignore: bool) -> Iterator[Tensor | slice]:
    """Yield the tokens of each chunk."""
    size = _chunk_size(columns)
    # A trace has no values: it counts a label for each token.
    if ignore and not isinstance(targets_T, FakeTensor):
        yield from (targets_T != NO_LABEL).nonzero().squeeze(1).split(size)
    else:
        yield from (slice(begin, begin + size) for begin in range(0, len(targets_T), size))


# --- for compilers: each computation as one operation


def _opaque(name: str, compute: Any, results_like: Any) -> dict[bool, Any]:
    """Return the operation without and with tokens to ignore, whose number no compiler can know."""
    custom_op: Any = torch.library.custom_op
    every = custom_op(f"orchestrator::{name}", compute, mutates_args=())
    # The host waits for it, which no CUDA graph can.
    unsafe = torch.Tag.cudagraph_unsafe
    some = custom_op(f"orchestrator::{name}_of_some", compute, mutates_args=(), tags=(unsafe,))
    for operation in (every, some):
        operation.register_fake(results_like)
    return {False: every, True: some}


_OPAQUE_VALUES = _opaque("token_loss_values", _values, _values_like)
_OPAQUE_GRADIENTS = _opaque("token_loss_gradients", _gradients, _gradients_like)
