"""Our AdamW against torch's: weights, averages, scaled and short gradients, skipped steps, restored state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.moe.weight_copy import WeightCopy
from orchestrator.train.optim import adamw
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.optimizer import ScheduledOptimizer

STEPS = 20
SHAPES = ((3, 5, 7), (11,), (2, 6))
LARGE = 50  # the first parameter is large, the others are torch's
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", LARGE)


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]


def give_gradients(parameters: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def assert_equal_training(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for parameter, expected in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
            state, other_state = ours.state[parameter], theirs.state[expected]
            assert state.keys() == other_state.keys()
            for slot, value in state.items():
                torch.testing.assert_close(value, other_state[slot], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_twenty_steps_equal_those_of_torch(rate: str) -> None:
    mine, other = make_parameters(), make_parameters()
    ours = AdamW(groups(mine), **SETTINGS)
    theirs = torch.optim.AdamW(groups(other), **SETTINGS, fused=True)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                value = 1e-2 / (step + 1)
                group["lr"] = torch.tensor(value) if rate == "tensor" else value
        give_gradients(mine, step)
        give_gradients(other, step)
        ours.step()
        theirs.step()
    assert_equal_training(ours, theirs)


def test_gradients_are_multiplied_by_the_factor_of_one_step() -> None:
    mine, other = make_parameters(), make_parameters()
    inner = AdamW(groups(mine), **SETTINGS)
    ours = ScheduledOptimizer(inner, lambda _: 1.0)
    theirs = torch.optim.AdamW(groups(other), **SETTINGS, fused=True)
    for step in range(4):
        give_gradients(mine, step, factor=4.0)
        give_gradients(other, step)
        ours.scale_gradients([], torch.tensor(0.25, dtype=torch.float64))
        ours.step(step, None)
        theirs.step()
    assert_equal_training(inner, theirs)
    assert inner.gradient_factor is None


def test_a_step_with_overflows_changes_nothing() -> None:
    parameters = make_parameters()
    inner = AdamW(groups(parameters), **SETTINGS)
    optimizer = ScheduledOptimizer(inner, lambda _: 1.0)
    give_gradients(parameters, 0)
    optimizer.step(0, torch.tensor(True))
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 1, factor=float("inf"))
    optimizer.step(1, torch.tensor(False))
    for parameter, expected in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0)
        assert float(inner.state[parameter]["step"]) == 1.0


def test_hooks_of_the_optimizer_run_once_in_a_step() -> None:
    mine = make_parameters()
    torch.optim.AdamW(make_parameters())  # torch wraps the steps of a class with its first optimizer
    ours = AdamW(groups(mine), **SETTINGS)
    calls: list[str] = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    give_gradients(mine, 0)
    ours.step()
    assert calls == ["before", "after"]


def test_state_of_torch_is_continued_and_the_other_way_round() -> None:
    mine, other, reference = make_parameters(), make_parameters(), make_parameters()
    first = torch.optim.AdamW(groups(other), **SETTINGS, fused=True)
    ours = AdamW(groups(mine), **SETTINGS)
    expected = torch.optim.AdamW(groups(reference), **SETTINGS, fused=True)
    for step in range(4):
        give_gradients(reference, step)
        expected.step()
    for step in range(2):
        give_gradients(other, step)
        first.step()
    ours.load_state_dict(first.state_dict())
    copy_weights(other, mine)
    give_gradients(mine, 2)
    ours.step()
    first.load_state_dict(ours.state_dict())
    copy_weights(mine, other)
    give_gradients(other, 3)
    first.step()
    assert_equal_training(first, expected)


@torch.no_grad()
def copy_weights(sources: list[nn.Parameter], targets: list[nn.Parameter]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def test_a_short_gradient_counts_as_its_values_in_fp32_and_the_copy_is_written() -> None:
    mine, other = make_parameters(), make_parameters()
    ours = AdamW(groups(mine), **SETTINGS)
    theirs = torch.optim.AdamW(groups(other), **SETTINGS, fused=True)
    copy = WeightCopy(mine[0], torch.bfloat16)
    ours.copies = {mine[0]: copy}
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(other, step)
        assert mine[0].grad is not None
        short = mine[0].grad.bfloat16()
        mine[0].grad = short
        other[0].grad = short.float()
        ours.step()
        theirs.step()
        assert mine[0].grad is short
        assert_current(copy)
    assert_equal_training(ours, theirs)


def assert_current(copy: WeightCopy) -> None:
    """Compare the copy without refreshing it."""
    expected: Tensor = copy.parameter.detach().bfloat16()
    torch.testing.assert_close(copy.weights.detach(), expected, rtol=0, atol=0)
    version = copy.weights._version
    copy.refresh()
    assert copy.weights._version == version, "the optimizer's own write is known"
