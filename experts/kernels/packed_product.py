"""Products with packed matrices: of experts, and of linear layers.

Matrices are unpacked one at a time. Where torch computes all groups of rows in one kernel, as many experts
are unpacked at a time as 256 MiB hold. Only the packed bytes are kept for the backward pass, and the rows get
a gradient alone: packed matrices are frozen. See ``experts.types`` for the letters of shapes; a product has
inner size K and outer size N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.kernels.autocast import without_autocast
from experts.kernels.grouped import MAX_GROUPS, bounded_offsets, is_fused, size_multiple
from experts.kernels.launching import available
from experts.kernels.loop import row_counts
from experts.kernels.packed import PackedForm
from experts.kernels.unpacking import unpacked_stack

UNPACKED_BYTES = 256 * 2**20
"""The most memory of experts that are unpacked at a time."""


@dataclass(frozen=True)
class PackedStack:
    """The packed matrices of several experts, one row of bytes each."""

    packed_EB: Tensor
    form: PackedForm


Matrices = Tensor | PackedStack
"""The matrices of several experts."""


def packed_products(rows_RK: Tensor, stack: PackedStack, counts_E: Tensor) -> Tensor:
    """Multiply each group of rows by the packed matrix of its expert."""
    if isinstance(rows_RK, FakeTensor):
        # The shapes of one product are those of all: without values, thousands of them take minutes.
        return _product(rows_RK, stack.packed_EB[:1], stack.form, None)
    size = experts_at_once(stack.form, rows_RK)
    counts = row_counts(counts_E, len(rows_RK))
    totals = [sum(counts[begin : begin + size]) for begin in range(0, len(counts), size)]
    pieces = zip(rows_RK.split(totals), stack.packed_EB.split(size), counts_E.split(size), strict=True)
    return torch.cat(
        [_product(rows, packed, stack.form, None if size == 1 else counts) for rows, packed, counts in pieces]
    )


def experts_at_once(form: PackedForm, rows_RK: Tensor) -> int:
    """Return how many experts are unpacked at a time for a product with rows."""
    multiple = size_multiple(rows_RK.dtype)
    has_kernel = is_fused(rows_RK.device, rows_RK.dtype) and available(rows_RK)
    if not has_kernel or form.inner % multiple or form.outer % multiple:
        return 1
    return experts_that_fit(form, rows_RK.dtype.itemsize)


def experts_that_fit(form: PackedForm, itemsize: int) -> int:
    """Return how many experts are unpacked at a time where one kernel unpacks and one multiplies them."""
    return min(MAX_GROUPS, max(1, UNPACKED_BYTES // (form.outer * form.inner * itemsize)))


def packed_product(rows_RK: Tensor, packed: Tensor, form: PackedForm) -> Tensor:
    """Multiply rows by the transpose of a packed matrix, in the type of the rows."""
    return _product(rows_RK, packed.unsqueeze(0), form, None)


def _product(rows_RK: Tensor, packed_EB: Tensor, form: PackedForm, counts_E: Tensor | None) -> Tensor:
    result: Tensor = _PackedProduct.apply(rows_RK, packed_EB, form, counts_E)
    return result


class _PackedProduct(torch.autograd.Function):
    """Matrices without rows are not unpacked: their product is empty, and their rows' gradient zero."""

    @staticmethod
    def forward(
        ctx: Any, rows_RK: Tensor, packed_EB: Tensor, form: PackedForm, counts_E: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed_EB, counts_E)
        ctx.form = form
        if not len(rows_RK):
            return rows_RK.new_empty(0, form.outer)
        matrices_ENK = _matrices(packed_EB, form, rows_RK.dtype)
        return _grouped_product(rows_RK, matrices_ENK.transpose(1, 2), counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        packed_EB, counts_E = ctx.saved_tensors
        (grad_RN,) = grads
        form: PackedForm = ctx.form
        if not len(grad_RN):
            return grad_RN.new_empty(0, form.inner), None, None, None
        matrices_ENK = _matrices(packed_EB, form, grad_RN.dtype)
        return _grouped_product(grad_RN.contiguous(), matrices_ENK, counts_E), None, None, None


def _matrices(packed_EB: Tensor, form: PackedForm, dtype: torch.dtype) -> Tensor:
    """Return the numbers of packed matrices."""
    if packed_EB.is_cuda and available() and not isinstance(packed_EB, FakeTensor):
        return unpacked_stack(packed_EB, form, dtype)
    if len(packed_EB) == 1:
        return form.unpack(packed_EB[0], dtype).unsqueeze(0)  # without another copy
    return torch.stack([form.unpack(packed, dtype) for packed in packed_EB.unbind()])


def _grouped_product(rows_RK: Tensor, matrices_EKN: Tensor, counts_E: Tensor | None) -> Tensor:
    if counts_E is None:
        return rows_RK @ matrices_EKN[0]
    offsets_E = bounded_offsets(counts_E.cumsum(0).to(torch.int32), len(rows_RK))
    return F.grouped_mm(rows_RK, matrices_EKN, offs=offsets_E)


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
