"""Products with packed matrices, which are unpacked one at a time: of experts, and of linear layers.

Only the packed bytes are kept for the backward pass, and the rows get a gradient alone: packed matrices are
frozen. A fused kernel that unpacks tiles takes the place of ``packed_products`` and of nothing else. See
``experts.types`` for the letters of shapes; a product has inner size K and outer size N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.kernels.autocast import without_autocast
from experts.kernels.loop import row_counts
from experts.kernels.packed import PackedForm


@dataclass(frozen=True)
class PackedStack:
    """The packed matrices of several experts, one row of bytes each."""

    packed_EB: Tensor
    form: PackedForm


Matrices = Tensor | PackedStack
"""The matrices of several experts."""


def packed_products(rows_RK: Tensor, stack: PackedStack, counts_E: Tensor) -> Tensor:
    """Multiply each group of rows by the packed matrix of its expert, one after another."""
    groups = rows_RK.split(row_counts(counts_E, len(rows_RK)))
    pieces = zip(groups, stack.packed_EB.unbind(), strict=True)
    return torch.cat([packed_product(rows, packed, stack.form) for rows, packed in pieces])


def packed_product(rows_RK: Tensor, packed: Tensor, form: PackedForm) -> Tensor:
    """Multiply rows by the transpose of a packed matrix, in the type of the rows."""
    result: Tensor = _PackedProduct.apply(rows_RK, packed, form)
    return result


class _PackedProduct(torch.autograd.Function):
    """A matrix without rows is not unpacked: its product is empty, and its rows' gradient zero."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, packed: Tensor, form: PackedForm) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.form = form
        if not len(rows_RK):
            return rows_RK.new_empty(0, form.outer)
        return rows_RK @ form.unpack(packed, rows_RK.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        (grad_RN,) = grads
        form: PackedForm = ctx.form
        if not len(grad_RN):
            return grad_RN.new_empty(0, form.inner), None, None
        return grad_RN @ form.unpack(packed, grad_RN.dtype), None, None


class PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight. It computes in the type of autocast, else of its input."""

    def __init__(self, linear: nn.Linear, form: PackedForm) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.form = form
        self.bias = linear.bias
        self.weight = nn.Parameter(form.pack(linear.weight.detach()), requires_grad=False)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            raise TypeError(
                f"a packed linear layer got numbers of type {input.dtype}: the model casts its input to the "
                "type of the weight, which holds bytes. Such a model needs whole frozen weights"
            )
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        with without_autocast(input):
            rows_RK = input.to(dtype).flatten(0, -2)
            output = packed_product(rows_RK, self.weight, self.form).unflatten(0, input.shape[:-1])
            return output if self.bias is None else output + self.bias.to(dtype)

    def unpacked(self, dtype: torch.dtype) -> nn.Linear:
        """Return a linear layer with whole weights."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.form.unpack(self.weight, dtype))
        linear.bias = self.bias
        return linear
