"""Changes of a layer's experts in one process: the function they keep, the optimizer's state, undoing."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.kernels.adapters import Adapters
from experts.moe.bank import ExpertBank
from experts.structure import Change, LayerStructure, changed
from experts.surgery.expert_transfer import Slot, StateSpec
from experts.surgery.surgery import Surgery, change_layer, restructure
from experts.types import Kind
from harness.moe.surgery import (
    SPEC,
    WIDTH,
    Model,
    born,
    carry_out,
    make,
    make_adamw,
    make_sgd,
    tokens,
    train_step,
)


def outputs(model: Model) -> Tensor:
    with torch.no_grad():
        return model(tokens(99, 64))


def all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor of a model and of its optimizer, by name."""
    result = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            result[f"{name}/{slot}"] = value.clone()
    return result


def assert_same_state(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_optimizer_fits(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    assert set(optimizer.state) <= set(model.parameters())
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
def test_a_split_keeps_the_function_where_all_experts_are_chosen(kind: Kind) -> None:
    model, optimizer = make((6, 5, 6), 3, kind=kind)
    before = outputs(model)
    carry_out(model, optimizer, born(3, parent=0))
    torch.testing.assert_close(outputs(model), before, rtol=1e-12, atol=1e-12)
    assert model.moe.gate.top_k == 4
    carry_out(model, optimizer, born(4, parent=3))  # a child is split again
    torch.testing.assert_close(outputs(model), before, rtol=1e-12, atol=1e-12)
    assert_optimizer_fits(model, optimizer)


def test_the_halves_of_a_split_expert_learn_different_things() -> None:
    model, optimizer = make((6, 6), 2)
    carry_out(model, optimizer, born(2, parent=0))
    for step in range(3, 8):
        train_step(model, optimizer, step)
    up = model.moe.bank.get_parameter("up_6")
    assert not torch.allclose(up[0], up[2])


def test_a_split_halves_the_averages_of_doubled_outputs() -> None:
    """The gradient of a doubled output is half of the old one, and its square a quarter."""
    model, optimizer = make((4, 4), 2)
    down = model.moe.bank.get_parameter("down_4")
    average, square = (optimizer.state[down][slot][0].clone() for slot in ("exp_avg", "exp_avg_sq"))
    weight = down.detach()[0].clone()
    carry_out(model, optimizer, born(2, parent=0))
    changed = model.moe.bank.get_parameter("down_4")
    state = optimizer.state[changed]
    for expert, units in ((0, slice(0, None, 2)), (2, slice(1, None, 2))):
        assert torch.equal(changed.detach()[expert][units], 2 * weight[units])
        assert torch.equal(state["exp_avg"][expert][units], average[units] / 2)
        assert torch.equal(state["exp_avg_sq"][expert][units], square[units] / 4)
    assert torch.equal(changed.detach()[0][1::2], torch.zeros(2, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(("make_optimizer", "slot"), [(make_sgd, "momentum_buffer"), (make_adamw, "exp_avg")])
def test_the_gates_averages_go_on_after_a_split_as_those_of_the_whole_expert(
    make_optimizer: Any, slot: str
) -> None:
    """The gradients of the halves add up to that of the whole: so do the averages after the next step."""
    model, _ = make((6, 5, 6), 3, steps=0)
    optimizer, spec = make_optimizer(model)
    for step in range(3):
        train_step(model, optimizer, step)
    whole, whole_optimizer = copy.deepcopy((model, optimizer))
    change_layer(model, model.moe, born(3, parent=0), Surgery(optimizer, spec, seed=0, step=3))
    train_step(model, optimizer, 3)
    train_step(whole, whole_optimizer, 3)
    average_ED = optimizer.state[model.moe.gate.weight_ED][slot]
    expected_ED = whole_optimizer.state[whole.moe.gate.weight_ED][slot]
    torch.testing.assert_close(average_ED[0] + average_ED[3], expected_ED[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(average_ED[1:3], expected_ED[1:3], rtol=1e-9, atol=1e-12)


def test_the_gates_squares_are_quartered_by_a_split() -> None:
    model, optimizer = make((6, 5, 6), 3)
    before_ED = optimizer.state[model.moe.gate.weight_ED]["exp_avg_sq"].clone()
    carry_out(model, optimizer, born(3, parent=0))
    after_ED = optimizer.state[model.moe.gate.weight_ED]["exp_avg_sq"]
    assert torch.equal(after_ED[[0, 3]], before_ED[[0, 0]] / 4)
    assert torch.equal(after_ED[1:3], before_ED[1:3])


def test_a_twin_keeps_the_function_under_top_k_routing() -> None:
    model, optimizer = make((6, 5, 6), 1)
    before = outputs(model)
    carry_out(model, optimizer, born(3, parent=0, warmup_steps=10))
    torch.testing.assert_close(outputs(model), before, rtol=1e-13, atol=1e-13)
    x = tokens(5, 200)
    _, routing = model.moe(model.before(x))
    shared = routing.counts_E.tolist()
    model.moe.eval()
    _, alone = model.moe(model.before(x))
    assert alone.counts_E[3] == 0, "the gate never chooses a twin"
    assert shared[0] + shared[3] == alone.counts_E[0]
    assert 0.25 < shared[3] / alone.counts_E[0] < 0.75
    assert model.moe.gate_counts(routing.counts_E).tolist() == alone.counts_E.tolist()


def test_a_twin_is_trained_until_the_gate_chooses_it() -> None:
    model, optimizer = make((6, 6, 6), 1)
    carry_out(model, optimizer, born(3, parent=0, warmup_steps=4))
    for step in range(3, 7):
        train_step(model, optimizer, step)
    up = model.moe.bank.get_parameter("up_6")
    assert not torch.equal(up[0], up[3])
    model.eval()
    before = outputs(model)
    carry_out(model, optimizer, Change("warmed", 0, (3,), "a test"), step=7)
    assert torch.equal(outputs(model), before), "its ramp begins with no share"
    gate = model.moe.gate.weight_ED.detach()
    torch.testing.assert_close(gate[0], gate[3], rtol=0.5, atol=0.5)
    assert not torch.equal(gate[0], gate[3])
    counts: list[int] = []
    for step in (8, 9, 10, 11):
        model.moe.use_priors(step)
        _, routing = model.moe(model.before(tokens(5, 400)))
        counts.append(int(routing.counts_E[3]))
    assert counts == sorted(counts), "it gains its share step by step"
    assert counts[-1] > 0
    assert [expert.prior_at(11) for expert in model.moe.structure.experts] == [0.0] * 4
    assert_optimizer_fits(model, optimizer)


def test_an_expert_made_afresh_gains_its_share_during_its_warm_up() -> None:
    model, optimizer = make((6, 6), 2)
    before = outputs(model)
    carry_out(model, optimizer, born(2, size=6, warmup_steps=4))
    assert torch.equal(outputs(model), before), "it begins without any share"
    weights: list[float] = []
    for step in (3, 4, 5, 7):
        model.moe.use_priors(step)
        _, routing = model.moe(model.before(tokens(5)))
        weights.append(routing.weights_TK[routing.experts_TK == 2].sum().item())
    assert weights[0] == 0.0
    assert weights == sorted(weights)
    state = optimizer.state[model.moe.bank.get_parameter("up_6")]
    assert not state["exp_avg"][2].any()
    assert torch.equal(state["exp_avg_sq"][2], state["exp_avg_sq"][0]), "the scale of another expert"


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_average_of_an_expert_made_afresh_begins_as_its_weights_do(top_k: int) -> None:
    """From zero it would be too small for as many steps as it averages over."""
    model, optimizer = make((6, 6), top_k)
    gate_before = model.moe.gate.weight_ED
    for parameter in model.parameters():
        optimizer.state[parameter]["ema"] = parameter.detach() * 0.5
    spec = replace(SPEC, slots=(*SPEC.slots, Slot("ema", torch.float64, False)))
    change = born(2, size=6, warmup_steps=4)
    change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=3))
    gate = model.moe.gate.weight_ED
    average_ED = optimizer.state[gate]["ema"]
    assert gate[2].any()
    assert torch.equal(average_ED[2], gate[2])
    assert torch.equal(average_ED[:2], gate_before * 0.5)
    for _, _, stack in model.moe.bank.stacks():
        assert torch.equal(optimizer.state[stack]["ema"][2], stack[2])


def test_a_merge_of_equal_experts_keeps_the_function() -> None:
    """The one expert has the share of both."""
    model, optimizer = make((6, 6, 6), 3)
    with torch.no_grad():
        for parameter in (model.moe.gate.weight_ED, *model.moe.bank.parameters()):
            parameter[2] = parameter[0]
    before = outputs(model)
    carry_out(model, optimizer, Change("merged", 0, (3,), "a test", parents=(0, 2), weights=(0.3, 0.7)))
    torch.testing.assert_close(outputs(model), before, rtol=1e-12, atol=1e-12)
    assert model.moe.structure.ids == (3, 1)
    assert model.moe.structure.expert(3).parents == (0, 2)


@pytest.mark.parametrize("kind", ["merged", "pruned", "born"])
def test_the_parent_of_a_twin_stays_as_it_is(kind: Any) -> None:
    model, optimizer = make((6, 6, 6), 1)
    carry_out(model, optimizer, born(3, parent=0, warmup_steps=5))
    parents = {"merged": (1, 0), "pruned": (), "born": (0,)}[kind]
    ids = (0,) if kind == "pruned" else (4,)
    with pytest.raises(ValueError, match="expert 0 has a twin in its warm-up"):
        carry_out(model, optimizer, Change(kind, 0, ids, "a test", parents=parents, weights=(1.0, 1.0)))


def test_a_merge_weights_by_use() -> None:
    model, optimizer = make((6, 6, 5), 1)
    up = model.moe.bank.get_parameter("up_6").detach().clone()
    gate = model.moe.gate.weight_ED.detach().clone()
    carry_out(model, optimizer, Change("merged", 0, (3,), "a test", parents=(1, 0), weights=(3.0, 1.0)))
    merged = model.moe.bank.get_parameter("up_6")
    torch.testing.assert_close(merged.detach()[0], up[1] * 0.75 + up[0] * 0.25)
    torch.testing.assert_close(model.moe.gate.weight_ED.detach()[0], gate[1] * 0.75 + gate[0] * 0.25)
    assert model.moe.structure.ids == (3, 2)
    assert model.moe.structure.expert(3).prior == pytest.approx(math.log(2))
    assert_optimizer_fits(model, optimizer)


def test_a_pruned_expert_leaves_a_layer_that_never_had_it() -> None:
    model, optimizer = make((6, 5, 6), 1)
    expected = copy.deepcopy(model)
    carry_out(model, optimizer, Change("pruned", 0, (1,), "a test"))
    gate = expected.moe.gate
    x_TD = expected.before(tokens(5))
    scores = (x_TD @ gate.weight_ED[[0, 2]].t()).softmax(-1)
    weight, choice = scores.max(-1)
    bank = ExpertBank(WIDTH, (6, 6)).double()
    bank.load_state_dict({name: expected.moe.bank.state_dict()[name] for name in ("up_6", "down_6")})
    actual, routing = model.moe(x_TD)
    for row in range(len(x_TD)):
        counts_L = torch.zeros(2, dtype=torch.int64).index_fill_(0, choice[row], 1)
        alone = bank(x_TD[row : row + 1], counts_L, weight[row : row + 1])
        torch.testing.assert_close(actual[row : row + 1], alone)
    assert routing.counts_E.sum() == len(x_TD)
    assert_optimizer_fits(model, optimizer)


@pytest.mark.parametrize(
    "change",
    [
        born(3, parent=0, warmup_steps=5),
        born(3, size=5, warmup_steps=5),
        Change("merged", 0, (3,), "a test", parents=(0, 2), weights=(1.0, 2.0)),
        Change("pruned", 0, (1,), "a test"),
    ],
    ids=lambda change: change.kind,
)
@pytest.mark.parametrize("top_k", [1, 3])
def test_an_undone_change_leaves_no_trace(change: Change, top_k: int) -> None:
    model, optimizer = make((6, 5, 6), top_k)
    twin, twin_optimizer = make((6, 5, 6), top_k)
    state = all_state(model, optimizer)
    parameters = [id(p) for p in model.parameters()]
    backup = carry_out(model, optimizer, change)
    backup.restore(step=3)
    assert [id(p) for p in model.parameters()] == parameters
    assert_same_state(all_state(model, optimizer), state)
    assert_optimizer_fits(model, optimizer)
    assert model.moe.gate.top_k == top_k
    losses = [train_step(model, optimizer, step) for step in range(3, 6)]
    assert losses == [train_step(twin, twin_optimizer, step) for step in range(3, 6)]
    expected = 3 if change.kind == "pruned" else 4
    assert model.moe.structure.next_id == expected, "an id is never used again"


def test_training_continues_with_frozen_experts() -> None:
    model, _ = make((6, 6), 1, steps=0)
    model.moe.bank.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train_step(model, optimizer, 0)
    spec = StateSpec(frozen=dict.fromkeys(("up", "down"), torch.float64))
    change_layer(model, model.moe, born(2, parent=1), Surgery(optimizer, spec, 0, 1))
    assert not any(p.requires_grad for p in model.moe.bank.parameters())
    train_step(model, optimizer, 1)
    assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def test_an_optimizer_with_unknown_state_is_refused_by_name() -> None:
    model, optimizer = make((6, 6), 2)
    spec = StateSpec((Slot("exp_avg", torch.float64, False), Slot("exp_inf", torch.float64, False)))
    for stack in model.moe.bank.parameters():
        optimizer.state[stack]["exp_inf"] = torch.zeros_like(stack)
    with pytest.raises(ValueError, match="keeps 'exp_inf'"):
        change_layer(model, model.moe, born(2, parent=0), Surgery(optimizer, spec, 0, 3))


def test_a_restructured_layer_takes_the_tensors_of_a_changed_one() -> None:
    model, optimizer = make((6, 5, 6), 1)
    carry_out(model, optimizer, born(3, parent=2, warmup_steps=9))
    carry_out(model, optimizer, Change("pruned", 0, (0,), "a test"))
    fresh, _ = make((6, 5, 6), 1, steps=0)
    saved = [LayerStructure.from_json(model.moe.structure.to_json())]
    restructure([fresh.moe], saved)
    fresh.double()
    fresh.load_state_dict(model.state_dict())
    fresh.moe.use_structure(saved[0], step=3)
    for training in (True, False):
        model.train(training)
        fresh.train(training)
        assert torch.equal(outputs(fresh), outputs(model))


def test_a_layer_is_restructured_whose_experts_have_copies() -> None:
    """It is not placed yet, so that it routes to no host."""
    fresh, _ = make((6, 5, 6), 1, steps=0)
    copied = Change("copied", 0, (1,), "a test", hosts=((1, 2),))
    restructure([fresh.moe], [changed(fresh.moe.structure, copied, 3)])
    assert fresh.moe.route_EB is None
    assert {expert.hosts for expert in fresh.moe.structure.experts} == {(0,)}


def test_a_restructured_layer_keeps_its_types_and_its_frozen_weights() -> None:
    model, _ = make((6, 6, 6), 1, steps=0)
    bank = model.moe.bank
    bank.to(torch.bfloat16)
    bank.adapt(Adapters(2, 1.0))
    before = {name: (p.dtype, p.requires_grad) for name, p in bank.named_parameters()}
    restructure([model.moe], [model.moe.structure])
    assert model.moe.bank is not bank
    assert {name: (p.dtype, p.requires_grad) for name, p in model.moe.bank.named_parameters()} == before
