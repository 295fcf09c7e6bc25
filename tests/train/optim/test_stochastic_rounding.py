"""Rounding by chance, against a slow one that treats one number at a time."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.moe.bank import ExpertBank
from orchestrator.config.settings import Config
from orchestrator.train.optim import stochastic_rounding
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer
from orchestrator.train.optim.stochastic_rounding import WeightRounding, draws, round_rows, rounded

_64_BITS = 2**64 - 1
KEY = 8_123_456_789_012_345


def slow_draw(key: int, index: int) -> int:
    """Return the 16 bits of an element: a piece of a number of SplitMix64."""
    number, piece = divmod(index, 4)
    value = (key + (number + 1) * 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    value ^= value >> 31
    return (value >> (16 * piece)) & 0xFFFF


def slow_rounded(value: float, draw: int) -> float:
    """Return one of the two neighbours in bf16, by the distance in units of 1/65536."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    lower = bits & 0xFFFF0000
    up = (bits & 0xFFFF) + draw >= 2**16
    (result,) = struct.unpack("<f", struct.pack("<I", lower + 0x10000 if up else lower))
    return result


@pytest.mark.parametrize(("first", "columns"), [(0, 9), (6, 5), (7, 1), (2**33 + 1, 6)])
def test_draws_are_pieces_of_splitmix64(first: int, columns: int) -> None:
    keys = [KEY, -3]
    found = draws(torch.tensor(keys), first, columns)
    expected = [[slow_draw(key & _64_BITS, first + c) for c in range(columns)] for key in keys]
    assert found.tolist() == expected


def test_values_are_rounded_by_their_draws() -> None:
    sizes = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, 1.9999, -math.pi, 255.5, 7e-5]
    values = torch.tensor(sizes * 20)
    numbers = draws(torch.tensor([KEY]), 0, len(values))[0]
    found = rounded(values, numbers)
    expected = [slow_rounded(v, d) for v, d in zip(values.tolist(), numbers.tolist(), strict=True)]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == expected


def test_what_is_not_finite_stays_so_whatever_is_drawn() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan])
    hidden_nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for draw in (0, 0xFFFF):
        found = rounded(values, torch.tensor([draw] * 3, dtype=torch.int32)).tolist()
        assert found[:2] == [math.inf, -math.inf]
        assert math.isnan(found[2])
        assert bool(rounded(hidden_nan, torch.tensor([draw] * 2, dtype=torch.int32)).isnan().all())


def test_rounding_is_unbiased_and_numbers_of_bf16_stay() -> None:
    count = 2**16
    values = torch.tensor([[1 + 2**-9], [-0.3], [3e-5], [0.5]]).expand(-1, count).contiguous()
    found = round_rows(values, torch.tensor([KEY, KEY + 1, KEY + 2, KEY + 3])).float()
    distance = found.amax(1) - found.amin(1)
    # The standard deviation of a mean is at most half of the distance over the root of the number.
    assert bool(((found.mean(1) - values[:, 0]).abs() <= 4 * distance / 2 / count**0.5).all())
    assert distance[:3].tolist() == [2**-7, 2**-9, 2**-23]
    assert distance[3] == 0


def test_parts_of_a_parameter_are_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 1003, generator=torch.Generator().manual_seed(1))
    keys = torch.tensor([KEY, 5, -9])
    whole = round_rows(values, keys)
    for begin, end in ((0, 1), (1, 334), (334, 1003)):
        part = round_rows(values[:, begin:end], keys, begin)
        assert torch.equal(part, whole[:, begin:end])
    assert torch.equal(round_rows(values[1:2], keys[1:2]), whole[1:2])
    monkeypatch.setattr(stochastic_rounding, "_CHUNK", 50)
    assert torch.equal(round_rows(values, keys), whole)


class Model(nn.Module):
    def __init__(self, held: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 7)
        self.bank = ExpertBank(4, (3, 6, 3, 3, 6), held=held)
        generator = torch.Generator().manual_seed(2)
        whole = {name: torch.randn(9, 8, 12, generator=generator) for name in ("up", "down")}
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            for group, role, stack in self.bank.stacks():
                for row, weight in zip(group.rows, stack, strict=True):
                    weight.copy_(whole[role][row, : weight.shape[0], : weight.shape[1]])


def gradient_like(parameter: Tensor, name: str, rows: tuple[int, ...] | None) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    gradient = torch.randn(9, *parameter.shape[1:], generator=generator)
    return gradient[list(rows) if rows is not None else slice(0, len(parameter))].clone()


def set_gradients(model: Model) -> None:
    rows = {f"bank.{role}_{group.hidden}": group.rows for group, role, _ in model.bank.stacks()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradient_like(parameter, name, rows.get(name))


def optimizer_of(model: Model, rounding: bool, **settings: Any) -> ScheduledOptimizer:
    optim = Config.of(learning_rate=1e-2, **settings).optim
    inner = build_named_optimizer(model, optim, fused=settings.get("optimizer") != "muon")
    wrapped = WeightRounding(model, inner, seed=3) if rounding else None
    return ScheduledOptimizer(inner, lambda _: 1.0, rounding=wrapped)


def trained(held: tuple[int, ...] = (0, 1, 2, 3, 4), **settings: Any) -> Model:
    model = Model(held).bfloat16()
    optimizer = optimizer_of(model, True, **settings)
    for step in range(3):
        set_gradients(model)
        optimizer.step(step, None)
    return model


def experts_of(model: Model) -> dict[tuple[int, str], Tensor]:
    stacks = model.bank.stacks()
    return {
        (row, role): weight
        for group, role, stack in stacks
        for row, weight in zip(group.rows, stack.detach(), strict=True)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw8bit", "muon"])
def test_a_step_is_that_of_the_optimizer_in_fp32_then_rounded(optimizer: str) -> None:
    short = Model().bfloat16()
    wide = Model().bfloat16().float()
    steps = {model: optimizer_of(model, model is short, optimizer=optimizer) for model in (short, wide)}
    moved = 0
    for step in range(3):
        with torch.no_grad():  # both start each step from the same weights
            for target, source in zip(wide.parameters(), short.parameters(), strict=True):
                target.copy_(source)
        for model, each in steps.items():
            set_gradients(model)
            each.step(step, None)
        for found, exact in zip(short.parameters(), wide.parameters(), strict=True):
            assert found.dtype == torch.bfloat16
            up = exact.detach().view(torch.int32) + 0xFFFF & -0x10000
            down = exact.detach().view(torch.int32) & -0x10000
            is_neighbour = (found == up.view(torch.float32)) | (found == down.view(torch.float32))
            assert bool(is_neighbour.all())
            moved += int((found != exact).sum())
    assert moved > 100
    slots = steps[short].inner.state[short.dense.weight]
    assert {slot.dtype for slot in slots.values()} <= {torch.float32, torch.uint8}


def test_few_parameters_at_a_time_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained()
    monkeypatch.setattr(stochastic_rounding, "_WIDE_ELEMENTS", 40)
    parts = trained()
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_an_expert_has_its_own_draws_wherever_it_lives() -> None:
    whole = experts_of(trained(optimizer="sgd"))
    for held in ((0, 1), (3,), (2, 4)):
        for key, weight in experts_of(trained(held, optimizer="sgd")).items():
            assert torch.equal(weight, whole[key]), key


def test_equal_experts_and_steps_have_draws_of_their_own() -> None:
    model = Model().bfloat16()
    stack = model.bank.get_parameter("up_3")
    optimizer = optimizer_of(model, True, optimizer="sgd", momentum=0.0)
    found: list[Tensor] = []
    for step in (0, 1, 1):
        with torch.no_grad():
            stack.fill_(1.0)
        stack.grad = torch.full(stack.shape, 0.3)
        optimizer.step(step, None)
        found.append(stack.detach().clone())
    first, second, repeated = found
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert torch.equal(second, repeated)


def test_a_step_that_is_skipped_changes_no_weight() -> None:
    model = Model().bfloat16()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = optimizer_of(model, True)
    set_gradients(model)
    optimizer.step(0, torch.tensor(False))
    assert all(map(torch.equal, before, model.parameters()))


def test_gradients_of_many_passes_add_up_in_fp32() -> None:
    model = Model().bfloat16()
    optimizer_of(model, True)
    weight = model.dense.weight
    for _ in range(300):
        (weight.float() * 1.0).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.unique().tolist() == [300.0]
