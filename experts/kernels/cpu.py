"""The weighted SwiGLU on a CPU, in blocks of rows that stay in the cache.

Plain torch passes over all rows once per operation, keeps the result of each, and copies the
gradients of gate and value into one tensor. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

_BLOCK_BYTES = 2**20  # of hidden rows; benchmarks/LOG.md has other sizes


def available(x: Tensor) -> bool:
    """Whether the function works for this tensor. A compiler fuses the plain operations itself."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def weighted_swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Return ``F.silu(gate) * value * weights_R[:, None]`` for ``gate, value = hidden_RH.chunk(2, -1)``.

    Results and gradients are those of autograd, bit by bit. Only the inputs are kept for the
    backward pass."""
    result: Tensor = _Swiglu.apply(hidden_RH, weights_R)
    return result


def _rows_per_block(hidden_RH: Tensor) -> int:
    if isinstance(hidden_RH, FakeTensor):  # a trace has the same operations for any number of rows
        return max(1, len(hidden_RH))
    row_bytes = hidden_RH.shape[1] * hidden_RH.itemsize
    return max(1, _BLOCK_BYTES // row_bytes)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RH, weights_R)
        size = _rows_per_block(hidden_RH)
        output_RH = hidden_RH.new_empty(len(hidden_RH), hidden_RH.shape[1] // 2)
        weights_R1 = weights_R.unsqueeze(1)
        blocks = zip(hidden_RH.split(size), output_RH.split(size), weights_R1.split(size), strict=True)
        for hidden_BH, output_BH, weights_B1 in blocks:
            gate_BH, value_BH = hidden_BH.chunk(2, dim=-1)
            torch.ops.aten.silu.out(gate_BH, out=output_BH)
            output_BH.mul_(value_BH).mul_(weights_B1)
        return output_RH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden_RH, weights_R = ctx.saved_tensors
        size = _rows_per_block(hidden_RH)
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weights_R = torch.empty_like(weights_R)
        tensors = (grads[0], hidden_RH, weights_R, grad_hidden_RH, grad_weights_R)
        for block in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            _swiglu_backward(*block)
        return grad_hidden_RH, grad_weights_R


def _swiglu_backward(
    grad_BH: Tensor, hidden_BH: Tensor, weights_B: Tensor, grad_hidden_BH: Tensor, grad_weights_B: Tensor
) -> None:
    """Write the gradients of a block of rows, B of them, into the last two tensors."""
    gate_BH, value_BH = hidden_BH.chunk(2, dim=-1)
    grad_gate_BH, grad_value_BH = grad_hidden_BH.chunk(2, dim=-1)
    activated_BH = F.silu(gate_BH)
    # Products are in the order of autograd, so that each rounds in the same way.
    torch.sum(activated_BH * value_BH * grad_BH, 1, out=grad_weights_B)
    grad_product_BH = grad_BH * weights_B.unsqueeze(1)
    torch.mul(grad_product_BH, activated_BH, out=grad_value_BH)
    grad_activated_BH = grad_product_BH.mul_(value_BH)  # in place: the gradient of value is done with it
    torch.ops.aten.silu_backward.grad_input(grad_activated_BH, gate_BH, grad_input=grad_gate_BH)
