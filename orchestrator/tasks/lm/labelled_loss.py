"""Cross-entropy of an output layer over the tokens that have a label, in chunks.

As in ``orchestrator.tasks.token_loss``, the logits of a chunk give its losses and, at once, the gradients of
its hidden states and of the output layer. Tokens without a label have no logits.

Shapes: T tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from experts.bank import computing_dtype
from experts.kernels.autocast import without_autocast
from orchestrator.tasks.token_loss import chunk_size, loss_and_gradient, wide_dtype

NO_LABEL = -100


class Tail(NamedTuple):
    """The function from the output layer's products to logits: a factor, then a soft cap (0 for none)."""

    scale: float = 1.0
    softcap: float = 0.0

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits, in fp32 at least."""
        logits = products.to(wide_dtype(products.dtype))
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


PLAIN = Tail()


def labelled_loss(
    hidden_TD: Tensor, output_VD: Tensor, bias_V: Tensor | None, labels_T: Tensor, tail: Tail = PLAIN
) -> Tensor:
    """Return the sum of the cross-entropy over the tokens with a label, in fp32 at least."""
    dtype = computing_dtype(hidden_TD)
    with without_autocast(hidden_TD):
        if torch.is_grad_enabled():
            return _LabelledLoss.apply(hidden_TD, output_VD, bias_V, labels_T, dtype, *tail)  # pyright: ignore[reportReturnType]
        bias_V = None if bias_V is None else bias_V.to(dtype)
        compute = _opaque_value if torch.compiler.is_compiling() else _value
        return compute(hidden_TD.to(dtype), output_VD.to(dtype), bias_V, labels_T, *tail)


def _value(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """Return the loss alone."""
    tail = Tail(scale, softcap)
    total = hidden_TD.new_zeros((), dtype=wide_dtype(hidden_TD.dtype))
    for rows_C in _labelled_rows(labels_T).split(chunk_size(len(output_VD))):
        logits_CV = tail(F.linear(hidden_TD[rows_C], output_VD, bias_V))
        total += F.cross_entropy(logits_CV, labels_T[rows_C], reduction="sum")
    return total


# A compiler cannot know the number of labels. The host waits for it, which no CUDA graph can.
_opaque = partial(torch.library.custom_op, mutates_args=(), tags=torch.Tag.cudagraph_unsafe)


@_opaque("orchestrator::labelled_loss_value")
def _opaque_value(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    return _value(hidden_TD, output_VD, bias_V, labels_T, scale, softcap)


@_opaque_value.register_fake
def _(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    del output_VD, bias_V, labels_T, scale, softcap
    return hidden_TD.new_empty((), dtype=wide_dtype(hidden_TD.dtype))


class _LabelledLoss(torch.autograd.Function):
    """Computes the gradients with the loss; the backward pass multiplies them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        output_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float,
    ) -> Tensor:
        # A frozen output layer, as beside adapters, saves a third of the products, and its gradient's memory.
        _, trains_output, trains_bias, *_ = ctx.needs_input_grad
        # A compiler would also move the gradients to the backward pass, and keep all logits until then.
        compute = _opaque_gradients if torch.compiler.is_compiling() else _gradients
        total, *gradients = compute(
            hidden_TD.to(dtype),
            output_VD.to(dtype),
            None if bias_V is None else bias_V.to(dtype),
            labels_T,
            scale,
            softcap,
            trains_output,
            trains_bias,
        )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden_TD, output_VD, bias_V)]
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        multiplied = [
            (gradient * grads[0]).to(dtype) if needed else None
            for gradient, dtype, needed in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:3], strict=True
            )
        ]
        return *multiplied, None, None, None, None


def _gradients(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
    trains_output: bool,
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients by the hidden states, the output matrix and the bias.

    A gradient that is not trained has no elements."""
    sums = _Sums(*_empty_results(hidden_TD, output_VD, trains_output, trains_bias))
    for result in (sums.total, sums.d_hidden_TD, sums.d_output_VD, sums.d_bias_V):
        result.zero_()
    for rows_C in _labelled_rows(labels_T).split(chunk_size(len(output_VD))):
        sums.add(rows_C, (hidden_TD, output_VD, bias_V), labels_T, Tail(scale, softcap))
    return sums.total, sums.d_hidden_TD, sums.d_output_VD, sums.d_bias_V


@_opaque("orchestrator::labelled_loss")
def _opaque_gradients(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
    trains_output: bool,
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(hidden_TD, output_VD, bias_V, labels_T, scale, softcap, trains_output, trains_bias)


@_opaque_gradients.register_fake
def _(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    scale: float,
    softcap: float,
    trains_output: bool,
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias_V, labels_T, scale, softcap
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
class _Sums:
    """The loss and its gradients over the chunks that are done."""

    total: Tensor
    d_hidden_TD: Tensor
    d_output_VD: Tensor
    d_bias_V: Tensor

    def add(
        self,
        rows_C: Tensor,
        layer: tuple[Tensor, Tensor, Tensor | None],
        labels_T: Tensor,
        tail: Tail,
    ) -> None:
        """Add a chunk. Its logits are free again when this returns."""
        hidden_TD, output_VD, bias_V = layer
        hidden_CD = hidden_TD[rows_C]
        products_CV = F.linear(hidden_CD, output_VD, bias_V)
        loss_C, d_products_CV = _loss_and_gradient(products_CV, labels_T[rows_C], tail)
        self.total.add_(loss_C.sum())
        self.d_hidden_TD[rows_C] = d_products_CV @ output_VD
        if len(self.d_output_VD):
            self.d_output_VD.add_(d_products_CV.T @ hidden_CD)
        if len(self.d_bias_V):
            self.d_bias_V.add_(d_products_CV.sum(0, dtype=self.d_bias_V.dtype))


def _loss_and_gradient(products_CV: Tensor, labels_C: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the gradient of their sum by the output layer's products."""
    if tail == PLAIN:
        return loss_and_gradient(products_CV, labels_C)
    logits_CV = tail(products_CV)
    # Before the loss: its gradient may be written in the logits' place.
    slope: Tensor | float = tail.scale
    if tail.softcap:
        slope = (logits_CV / tail.softcap).square_().neg_().add_(1).mul_(tail.scale)
    loss_C, d_logits_CV = loss_and_gradient(logits_CV, labels_C)
    return loss_C, (d_logits_CV * slope).to(products_CV.dtype)


def _labelled_rows(labels_T: Tensor) -> Tensor:
    if isinstance(labels_T, FakeTensor):
        return torch.arange(len(labels_T), device=labels_T.device)  # a trace counts a label for each token
    return (labels_T != NO_LABEL).nonzero().squeeze(1)
