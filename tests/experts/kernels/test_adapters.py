"""Experts with adapters beside their matrices: against experts with the sum of both, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experts.kernels.adapters import Adapters
from experts.moe.bank import ExpertBank, ExpertForm
from experts.types import Kernel

COUNTS = ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0])
WIDTH = 8
HIDDEN = 12


def make_bank(adapters: Adapters, form: ExpertForm, dtype: torch.dtype) -> ExpertBank:
    bank = ExpertBank(WIDTH, [HIDDEN] * 4, form).to(dtype)
    bank.adapt(adapters)
    generator = torch.Generator().manual_seed(3)
    for parameter in bank.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return bank


def summed(bank: ExpertBank, adapters: Adapters) -> ExpertBank:
    """Return a bank whose matrices are functions of the adapters: autograd gives their gradients."""
    plain = ExpertBank(WIDTH, bank.sizes, replace(bank.form, adapters=None))
    for group, role, _ in list(plain.stacks()):
        weights: Tensor = bank.get_parameter(f"{role}_{group.hidden}")
        if role in adapters.matrices:
            first = bank.get_parameter(f"{role}_lora_a_{group.hidden}")
            second = bank.get_parameter(f"{role}_lora_b_{group.hidden}")
            weights = weights + adapters.scale * torch.einsum("ekr,ern->ekn", first, second)
        delattr(plain, f"{role}_{group.hidden}")
        setattr(plain, f"{role}_{group.hidden}", weights)
    plain.get_parameter = lambda target: getattr(plain, target)
    plain.kernel = "loop"
    return plain


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("matrices", [("up", "down"), ("up",), ("down",)], ids=str)
@pytest.mark.parametrize("form", [ExpertForm(), ExpertForm("ffn", bias=True)], ids=["swiglu", "ffn, biases"])
def test_outputs_and_gradients_equal_those_of_the_sum(
    counts: list[int], kernel: Kernel, matrices: tuple[str, ...], form: ExpertForm
) -> None:
    dtype = torch.float32 if kernel == "grouped" else torch.float64
    tolerance = 1e-5 if kernel == "grouped" else 1e-12
    # A rank that the grouped product does not take.
    adapters = Adapters(3, 0.7, matrices)
    bank = make_bank(adapters, form, dtype)
    bank.kernel = kernel
    generator = torch.Generator().manual_seed(2)
    rows_RD = torch.randn(sum(counts), WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weights_R = torch.rand(sum(counts), dtype=dtype, generator=generator).requires_grad_()
    trained = [parameter for parameter in bank.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(matrices)
    results = []
    for each in (bank, summed(bank, adapters)):
        output_RD = each(rows_RD, torch.tensor(counts), weights_R)
        gradients = torch.autograd.grad(output_RD.square().sum(), [rows_RD, weights_R, *trained])
        results.append((output_RD, *gradients))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=10 * tolerance, atol=10 * tolerance)


def test_the_weights_of_frozen_experts_get_no_gradient() -> None:
    bank = make_bank(Adapters(4, 1.0), ExpertForm(), torch.float32)
    bank(torch.randn(5, WIDTH), torch.tensor([1, 0, 2, 2]), torch.ones(5)).sum().backward()
    assert {name for name, p in bank.named_parameters() if p.grad is not None} == {
        f"{role}_{HIDDEN}" for role in ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
    }


def test_a_part_of_a_bank_has_its_adapters_and_its_frozen_weights() -> None:
    bank = make_bank(Adapters(2, 1.0), ExpertForm(), torch.float32)
    part = bank.part([1, 3])
    for name, parameter in part.named_parameters():
        whole = bank.get_parameter(name)
        assert torch.equal(parameter, whole[[1, 3]])
        assert parameter.requires_grad == whole.requires_grad == ("lora" in name)
