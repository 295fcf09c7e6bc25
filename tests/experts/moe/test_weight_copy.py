"""Copies of weights against casts in each pass: outputs and gradients to the bit, and never an old copy."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.moe.bank import ExpertBank
from experts.moe.weight_copy import WeightCopy

WIDTH = 16
SIZES = (8, 24, 8, 8, 24, 8, 8)
COUNTS = (5, 0, 7, 1, 3, 4, 2)  # by slot; one expert has no rows


def make_bank(with_copies: bool, short_gradients: bool = True) -> ExpertBank:
    torch.manual_seed(0)
    bank = ExpertBank(WIDTH, SIZES)
    if with_copies:
        for group, role, stack in bank.stacks():
            copy = WeightCopy(stack, torch.bfloat16)
            copy.keeps_short_gradient = short_gradients
            bank.copies[f"{role}_{group.hidden}"] = copy
    return bank


def run(bank: ExpertBank) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rows_RD = torch.randn(sum(COUNTS), WIDTH, generator=generator)
    weights_R = torch.rand(sum(COUNTS), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return bank(rows_RD, torch.tensor(COUNTS), weights_R)


def backward(bank: ExpertBank, passes: int = 1) -> dict[str, Tensor]:
    for _ in range(passes):
        (run(bank).float().square()).sum().backward()
    return {name: p.grad for name, p in bank.named_parameters() if p.grad is not None}


def test_outputs_and_gradients_are_those_of_a_cast_in_each_pass() -> None:
    plain, copied = make_bank(with_copies=False), make_bank(with_copies=True)
    torch.testing.assert_close(run(copied), run(plain), rtol=0, atol=0)
    expected, found = backward(plain), backward(copied)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.float(), expected[name], rtol=0, atol=0)


def test_gradients_of_several_passes_are_summed_in_fp32() -> None:
    plain, copied = make_bank(with_copies=False), make_bank(with_copies=True, short_gradients=False)
    expected, found = backward(plain, passes=3), backward(copied, passes=3)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def scale_in_place(bank: ExpertBank) -> None:
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.mul_(0.5)


def scale_detached(bank: ExpertBank) -> None:
    for parameter in bank.parameters():
        parameter.detach().copy_(parameter.detach() * 0.5)


def load(bank: ExpertBank) -> None:
    bank.load_state_dict({name: tensor * 0.5 for name, tensor in bank.state_dict().items()})


def replace_storage(bank: ExpertBank) -> None:
    for parameter in bank.parameters():
        parameter.data = parameter.data * 0.5


def replace_parameters(bank: ExpertBank) -> None:
    for name, parameter in list(bank.named_parameters()):
        bank.register_parameter(name, nn.Parameter(parameter.detach() * 0.5))


def write_one_expert(bank: ExpertBank) -> None:
    with torch.no_grad():
        for _, _, stack in bank.stacks():
            stack[0].copy_(stack[0] * 0.5)


def step_of_torch(bank: ExpertBank) -> None:
    for parameter in bank.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(bank.parameters(), lr=0.1).step()


WRITES = [
    scale_in_place,
    scale_detached,
    load,
    replace_storage,
    replace_parameters,
    write_one_expert,
    step_of_torch,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_copy_follows_every_write_to_its_weights(write: Callable[[ExpertBank], None]) -> None:
    plain, copied = make_bank(with_copies=False), make_bank(with_copies=True)
    before = run(copied)
    write(plain)
    write(copied)
    after = run(copied)
    torch.testing.assert_close(after, run(plain), rtol=0, atol=0)
    assert not torch.equal(after, before)


def test_a_copy_is_not_used_where_products_have_another_type() -> None:
    plain, copied = make_bank(with_copies=False), make_bank(with_copies=True)
    rows_RD = torch.randn(sum(COUNTS), WIDTH)
    arguments = (rows_RD, torch.tensor(COUNTS), torch.ones(sum(COUNTS)))
    torch.testing.assert_close(copied(*arguments), plain(*arguments), rtol=0, atol=0)


def test_copies_are_freed_with_their_bank() -> None:
    bank = make_bank(with_copies=True)
    backward(bank)
    references = [weakref.ref(parameter) for parameter in bank.parameters()]
    references += [weakref.ref(each.weights) for each in bank.copies.values()]
    del bank
    gc.collect()
    assert all(reference() is None for reference in references)


def test_a_copied_bank_has_weights_of_its_own() -> None:
    bank = make_bank(with_copies=True)
    other = copy.deepcopy(bank)
    assert not other.copies
    expected, found = backward(bank), backward(other)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name].float(), rtol=0, atol=0)


def test_a_copy_of_a_compiled_bank_computes_with_its_own_weights() -> None:
    bank = make_bank(with_copies=True)
    handle: Any = bank
    # A function that calls this very bank, as ``--compile-parts experts`` sets it.
    handle._compiled_call_impl = lambda *arguments: bank._call_impl(*arguments)
    other = copy.deepcopy(bank)
    scale_in_place(bank)
    torch.testing.assert_close(run(other), run(make_bank(with_copies=False)), rtol=0, atol=0)


def test_a_stack_that_is_frozen_later_gets_no_gradient() -> None:
    bank = make_bank(with_copies=True)
    frozen, trained = bank.get_parameter("up_8"), bank.get_parameter("down_8")
    frozen.requires_grad_(False)
    assert backward(bank).keys() == {"down_8", "up_24", "down_24"}
    bank.zero_grad()
    frozen.requires_grad_(True)
    trained.requires_grad_(False)
    assert backward(bank).keys() == {"up_8", "up_24", "down_24"}
