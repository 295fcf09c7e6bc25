"""Packed matrices on a GPU: the kernel that unpacks them, and products with many at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.kernels import packed_product as module
from experts.kernels.packed import PackedForm
from experts.kernels.packed_product import PackedStack, packed_products
from experts.kernels.unpacking import unpacked_stack
from experts.types import Packing

pytestmark = pytest.mark.gpu

FORMS = [
    PackedForm("nf4", 20, 12, parts=2),
    PackedForm("nf4", 64, 40),
    PackedForm("int8", 33, 7),
    PackedForm("nf4", 1536, 1024, parts=2),
    PackedForm("int8", 768, 512),
]
"""Sizes that fill no block, several groups of scales, and one and two parts."""


def packed_matrices(form: PackedForm, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.empty(count, *form.shape).normal_(generator=generator)
    matrices[0] *= 30
    return torch.stack([form.pack(matrix) for matrix in matrices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernel_unpacks_the_numbers_of_plain_torch(form: PackedForm, dtype: torch.dtype) -> None:
    packed = packed_matrices(form, 3)
    expected = torch.stack([form.unpack(each, dtype) for each in packed])
    found = unpacked_stack(packed.cuda(), form, dtype)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(unpacked_stack(packed.cuda()[1:], form, dtype).cpu(), expected[1:])


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("packing", ["nf4", "int8"])
def test_products_and_gradients_are_those_of_whole_matrices(
    packing: Packing, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces have no rows, and some of their experts none."""
    counts = (300, 0, 17, 64, 0, 0, 1)
    form = PackedForm(packing, 256, 128, parts=2)
    monkeypatch.setattr(module, "UNPACKED_BYTES", at_once * 256 * 128 * 2)
    packed = packed_matrices(form, len(counts)).cuda()
    whole = [form.unpack(each.cpu(), torch.float32).bfloat16().double().cuda() for each in packed]
    rows = torch.randn(sum(counts), 128, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(sum(counts), 256, device="cuda").bfloat16()
    found = packed_products(rows, PackedStack(packed, form), torch.tensor(counts, device="cuda"))
    (grad,) = torch.autograd.grad((found * weight).sum(), rows)
    exact = rows.detach().double().requires_grad_()
    pieces = zip(exact.split(counts), whole, strict=True)
    expected = torch.cat([piece @ matrix.t() for piece, matrix in pieces])
    (expected_grad,) = torch.autograd.grad((expected * weight.double()).sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.std()))
    torch.testing.assert_close(
        grad.double(), expected_grad, rtol=2e-2, atol=2e-2 * float(expected_grad.std())
    )


def test_rows_do_not_depend_on_the_experts_beside_them() -> None:
    """Experts of other hosts change the pieces, and the groups of a product."""
    counts = (300, 0, 17, 64, 5)
    form = PackedForm("nf4", 256, 128, parts=2)
    packed = packed_matrices(form, len(counts)).cuda()
    rows = torch.randn(sum(counts), 128, device="cuda").bfloat16()
    together = packed_products(rows, PackedStack(packed, form), torch.tensor(counts, device="cuda"))
    some = packed_products(
        rows[300:381], PackedStack(packed[2:4], form), torch.tensor(counts[2:4], device="cuda")
    )
    assert torch.equal(together[300:381], some)
