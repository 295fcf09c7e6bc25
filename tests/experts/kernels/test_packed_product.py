"""Products with packed matrices against those with the numbers that the bytes stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from experts.kernels.packed import PackedForm
from experts.kernels.packed_product import PackedLinear, PackedStack, packed_products

COUNTS = (3, 0, 1, 5, 0, 2, 0)
"""Rows of seven experts, three of which have none."""
FORM = PackedForm("nf4", outer=20, inner=12, parts=2)


def stack() -> PackedStack:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.empty(len(COUNTS), *FORM.shape).normal_(generator=generator)
    return PackedStack(torch.stack([FORM.pack(matrix) for matrix in matrices]), FORM)


def test_products_and_gradients_are_those_of_whole_matrices() -> None:
    packed = stack()
    rows = torch.randn(sum(COUNTS), FORM.inner, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(COUNTS), FORM.outer, dtype=torch.float64)
    whole = [FORM.unpack(each, torch.float64) for each in packed.packed_EB]
    pieces = zip(rows.split(COUNTS), whole, strict=True)
    expected = torch.cat([piece @ matrix.t() for piece, matrix in pieces])
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), rows)
    found = packed_products(rows, packed, torch.tensor(COUNTS))
    (grad,) = torch.autograd.grad((found * weight).sum(), rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_experts_without_rows_have_a_gradient_of_nothing() -> None:
    rows = torch.randn(0, FORM.inner, requires_grad=True)
    found = packed_products(rows, stack(), torch.zeros(len(COUNTS), dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0, FORM.outer)
    assert rows.grad is not None


def test_the_packed_bytes_alone_are_kept_and_no_matrix_is_unpacked_for_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[Tensor] = []
    unpacked: list[Tensor] = []
    unpack = PackedForm.unpack

    def counting(form: PackedForm, packed: Tensor, dtype: torch.dtype) -> Tensor:
        unpacked.append(packed)
        return unpack(form, packed, dtype)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    packed = stack()
    monkeypatch.setattr(PackedForm, "unpack", counting)
    rows = torch.randn(sum(COUNTS), FORM.inner, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = packed_products(rows, packed, torch.tensor(COUNTS))
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == {packed.packed_EB.data_ptr()}
    assert len(unpacked) == 4
    found.sum().backward()
    assert len(unpacked) == 8


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_computes_what_its_unpacked_one_does(bias: bool) -> None:
    packed = PackedLinear(nn.Linear(24, 10, bias=bias), PackedForm("int8", 10, 24))
    whole = packed.unpacked(torch.float32)
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(packed(x), whole(x), rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = packed(x), whole(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
