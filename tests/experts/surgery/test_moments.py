"""The optimizer's averages after merges and splits, against those of an expert that had all tokens always.

The learning rate is 0: two experts with equal weights keep them, so that one expert in their place would
have had the sum of their gradients in each step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from experts.structure import Change
from experts.surgery.expert_transfer import StateSpec
from experts.surgery.optimizer_state import added, halved
from experts.surgery.surgery import Surgery, change_layer
from harness.moe.surgery import (
    Model,
    born,
    carry_out,
    make,
    make_adamw,
    make_muon,
    make_sgd,
    train_step,
)

LINEAR = [(make_sgd, "momentum_buffer"), (make_muon, "momentum_buffer"), (make_adamw, "exp_avg")]
MakeOptimizer = Callable[..., tuple[torch.optim.Optimizer, StateSpec]]
NUM_STEPS = 6


def merged(new_id: int, first: int, second: int) -> Change:
    return Change("merged", 0, (new_id,), "a test", parents=(first, second), weights=(0.3, 0.7))


def train(model: Model, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, NUM_STEPS):
        train_step(model, optimizer, step)


def slots(model: Model, optimizer: torch.optim.Optimizer, slot: str, expert_id: int) -> dict[str, Tensor]:
    """Return a tensor of the optimizer for an expert's matrices and for its row of the gate."""
    layer = model.moe
    row = layer.structure.index(expert_id)
    found = {"gate": optimizer.state[layer.gate.weight_ED][slot][row]}
    for group, role, stack in layer.bank.stacks():
        if row in group.rows:
            found[role] = optimizer.state[stack][slot][group.rows.index(row)]
    return found


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.any(), f"{name}: the oracle has no gradient"
        torch.testing.assert_close(actual[name], tensor, rtol=1e-11, atol=1e-14, msg=name)


def merge_of_equals(make_optimizer: MakeOptimizer, slot: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the averages of two equal experts merged after the steps, and of two merged before them.

    Every token goes to every expert."""
    model, _ = make((6, 5, 6), 3, steps=0)
    with torch.no_grad():
        for parameter in (model.moe.gate.weight_ED, *model.moe.bank.parameters()):
            if len(parameter) == len(model.moe.load_E) or parameter.shape[0] == 2:
                parameter[-1] = parameter[0]
    oracle = copy.deepcopy(model)
    optimizer, spec = make_optimizer(model, lr=0.0)
    oracle_optimizer, _ = make_optimizer(oracle, lr=0.0)
    change = merged(3, 0, 2)
    change_layer(oracle, oracle.moe, change, Surgery(oracle_optimizer, StateSpec(), seed=0, step=0))
    train(oracle, oracle_optimizer)
    train(model, optimizer)
    change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=NUM_STEPS))
    return slots(model, optimizer, slot, 3), slots(oracle, oracle_optimizer, slot, 3)


@pytest.mark.parametrize(("make_optimizer", "slot"), [*LINEAR, (make_adamw, "exp_avg_sq")])
def test_merged_experts_with_the_same_tokens_have_the_averages_of_one(
    make_optimizer: MakeOptimizer, slot: str
) -> None:
    actual, expected = merge_of_equals(make_optimizer, slot)
    assert_all_close(actual, expected)


def split_and_whole(
    make_optimizer: MakeOptimizer,
) -> tuple[Model, torch.optim.Optimizer, Model, torch.optim.Optimizer, StateSpec]:
    """Return a model whose expert 0 got a twin after two steps, and the same model without the split."""
    model, _ = make((6, 5, 6), 1, steps=0)
    whole = copy.deepcopy(model)
    optimizer, spec = make_optimizer(model, lr=0.0)
    whole_optimizer, _ = make_optimizer(whole, lr=0.0)
    train(whole, whole_optimizer)
    for step in range(2):
        train_step(model, optimizer, step)
    change = born(3, parent=0, warmup_steps=NUM_STEPS)
    change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=2))
    train(model, optimizer, first=2)
    return model, optimizer, whole, whole_optimizer, spec


@pytest.mark.parametrize(("make_optimizer", "slot"), LINEAR)
def test_merged_experts_with_their_own_tokens_have_the_average_of_one(
    make_optimizer: MakeOptimizer, slot: str
) -> None:
    """A twin and its parent have about half of the parent's tokens each; the merged expert has all."""
    model, optimizer, whole, whole_optimizer, spec = split_and_whole(make_optimizer)
    for change in (Change("warmed", 0, (3,), "a test"), merged(4, 0, 3)):
        change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=NUM_STEPS))
    assert_all_close(slots(model, optimizer, slot, 4), slots(whole, whole_optimizer, slot, 0))


def test_the_squares_of_merged_experts_with_their_own_tokens_are_at_least_half_of_the_right_ones() -> None:
    """They are exact where the noise of the two is independent, and too large where gradients cancel out."""
    model, optimizer, whole, whole_optimizer, _ = split_and_whole(make_adamw)
    parent = slots(model, optimizer, "exp_avg_sq", 0)
    twin = slots(model, optimizer, "exp_avg_sq", 3)
    expected = slots(whole, whole_optimizer, "exp_avg_sq", 0)
    for change in (Change("warmed", 0, (3,), "a test"), merged(4, 0, 3)):
        carry_out(model, optimizer, change, NUM_STEPS)
    actual = slots(model, optimizer, "exp_avg_sq", 4)
    for role in ("up", "down"):
        torch.testing.assert_close(actual[role], parent[role] + twin[role])
        assert (expected[role] <= 2 * actual[role] * (1 + 1e-9)).all(), role
        assert 0.5 < (expected[role].sum() / actual[role].sum()).item() < 2.0, role


def test_halves_of_a_tensor_add_up_to_it() -> None:
    whole = torch.rand(4, dtype=torch.float64)
    for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
        for same_tokens in (True, False):
            half = halved(slot, whole, same_tokens=same_tokens)
            torch.testing.assert_close(added(slot, half, half, same_tokens=same_tokens), whole)


def test_the_squares_of_added_gradients_are_an_upper_bound_where_both_have_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 50, 200, generator=generator, dtype=torch.float64)
    bound = added("exp_avg_sq", first.square().mean(0), second.square().mean(0), same_tokens=True)
    assert ((first + second).square().mean(0) <= bound).all()
    parallel = added("exp_avg_sq", first.square().mean(0), (3 * first).square().mean(0), same_tokens=True)
    torch.testing.assert_close(parallel, (4 * first).square().mean(0))


@pytest.mark.parametrize("kind", ["born", "warmed"])
def test_a_row_whose_ramp_begins_has_no_average_and_the_scale_of_the_others(kind: str) -> None:
    model, optimizer = make((6, 6, 6), 1)
    if kind == "warmed":
        carry_out(model, optimizer, born(3, parent=0, warmup_steps=2))
        train_step(model, optimizer, 3)
    state = optimizer.state[model.moe.gate.weight_ED]
    scale_D = state["exp_avg_sq"].mean(0)
    change = born(3, size=6, warmup_steps=4) if kind == "born" else Change("warmed", 0, (3,), "a test")
    carry_out(model, optimizer, change, step=5)
    state = optimizer.state[model.moe.gate.weight_ED]
    assert not state["exp_avg"][3].any()
    torch.testing.assert_close(state["exp_avg_sq"][3], scale_D)
