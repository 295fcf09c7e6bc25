"""The layer against its oracle: outputs, losses, counts and every gradient, in fp64, at sizes that divide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experts.balance import moe_layers, update_balance
from experts.context import MoEContext, StepContext
from experts.gate import noise
from experts.layer import MoELayer
from experts.model import attach, initialise
from tests.support.oracle import moe_oracle

SHAPES = [  # width, sizes, top_k, tokens
    (5, [7], 1, 3),
    (6, [4, 4, 4], 2, 11),
    (7, [3, 9, 3, 5, 9], 2, 13),
    (4, [8] * 17, 3, 5),  # more experts than tokens: most get none
    (8, [2, 6], 2, 0),  # no tokens at all
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ffn": {"kind": "ffn"},
    "sigmoid": {"scores": "sigmoid"},
    "not normalised": {"normalise": False},
    "sigmoid, not normalised": {"scores": "sigmoid", "normalise": False},
    "bias": {"bias_rate": 0.1},
    "bias over sigmoid": {"scores": "sigmoid", "bias_rate": 0.1},
    "jitter": {"jitter": 0.9},
    "capacity below one": {"capacity": 0.6},
    "capacity above one": {"capacity": 1.1},
    "shared expert": {"shared": 5},
    "all at once": {
        "kind": "ffn",
        "scores": "sigmoid",
        "normalise": False,
        "bias_rate": 0.1,
        "jitter": 0.5,
        "capacity": 0.7,
        "shared": 3,
    },
}


def make(width: int, sizes: list[int], top_k: int, seed: int = 3, **options: Any) -> MoELayer:
    layer = MoELayer(width, sizes, top_k, **options).double()
    initialise(layer, seed)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(50)  # decided gates: no ties, and uneven loads
        layer.gate.bias_E.copy_(1.2 * torch.cos(2.0 * torch.arange(len(sizes))))
        layer.load_E.copy_(torch.arange(1, len(sizes) + 1))
    return layer


def tokens_of(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def noise_of(layer: MoELayer, positions: Tensor) -> Tensor | None:
    seed, width = layer.context.step.seed + layer.layer_id, layer.gate.weight_ED.shape[1]
    return noise(seed, positions, width, layer.jitter, torch.float64) if layer.jitter else None


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("width", "sizes", "top_k", "tokens"), SHAPES)
def test_layer_equals_oracle(width: int, sizes: list[int], top_k: int, tokens: int, name: str) -> None:
    layer = make(width, sizes, top_k, **OPTIONS[name])
    attach(layer, MoEContext(step=StepContext(seed=12345)))
    x = tokens_of(tokens, width).requires_grad_()
    y, routing = layer(x)
    expected, balance, z, counts = moe_oracle(layer, x, noise_of(layer, torch.arange(tokens)))
    assert routing.counts_E.tolist() == counts
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routing.balance, balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.z, z, rtol=1e-12, atol=1e-300)
    parameters = [x, *layer.parameters()]
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    ours = torch.autograd.grad((y * weight).sum() + 0.3 * routing.balance + 0.1 * routing.z, parameters)
    theirs = torch.autograd.grad(
        (expected * weight).sum() + 0.3 * balance + 0.1 * z, parameters, allow_unused=True
    )
    for mine, other, parameter in zip(ours, theirs, parameters, strict=True):
        torch.testing.assert_close(
            mine, torch.zeros_like(parameter) if other is None else other, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option_changes_something(name: str) -> None:
    """So that the cases above are not all the same one."""
    x = tokens_of(11, 6)
    plain, other = (make(6, [4, 4, 4], 2, **options)(x)[0] for options in ({}, OPTIONS[name]))
    assert not torch.allclose(plain, other, rtol=1e-3)


def test_the_bias_changes_the_choice_and_neither_weights_nor_losses() -> None:
    x = tokens_of(40, 7)
    without, biased = (
        make(7, [4] * 5, 2, normalise=False),
        make(7, [4] * 5, 2, normalise=False, bias_rate=0.1),
    )
    before, after = without(x)[1], biased(x)[1]
    assert not torch.equal(before.experts_TK, after.experts_TK)
    scores_TE = (x @ biased.gate.weight_ED.t()).softmax(-1)
    torch.testing.assert_close(after.weights_TK, scores_TE.gather(1, after.experts_TK), rtol=1e-13, atol=0)
    assert torch.equal(before.balance, after.balance)
    assert torch.equal(before.z, after.z)


def test_a_token_without_room_gets_the_shared_expert_alone() -> None:
    """All four want one expert, which has room for two: the first ones."""
    layer = make(4, [3, 5], 1, capacity=1.0, shared=3)
    with torch.no_grad():
        layer.gate.weight_ED.copy_(torch.tensor([[9.0, 0, 0, 0], [-9.0, 0, 0, 0]]))
    x = tokens_of(4, 4).abs().requires_grad_()
    y, routing = layer(x)
    assert layer.shared is not None
    beside = layer.shared(x)
    assert routing.counts_E.tolist() == [4, 0], "the gate counts what it chose"
    torch.testing.assert_close(y[2:], beside[2:], rtol=1e-13, atol=0)
    assert not torch.isclose(y[:2], beside[:2]).any()
    up = layer.bank.get_parameter("up_3")
    assert not torch.autograd.grad(y[2:].sum(), up, retain_graph=True)[0].any()
    assert torch.autograd.grad(y[:2].sum(), up)[0].any()


def test_jitter_is_drawn_by_the_place_in_the_global_batch_and_in_training_alone() -> None:
    layer = make(6, [4, 4, 4], 2, jitter=0.9)
    x = tokens_of(5, 3, 6)
    with layer.context.use_step(StepContext(seed=7)):
        whole, _ = layer(x)
    parts = []
    for begin, end in ((0, 2), (2, 5)):
        with layer.context.use_step(StepContext(seed=7, first_sample=begin)):
            parts.append(layer(x[begin:end])[0])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)
    with layer.context.use_step(StepContext(seed=8)):
        assert not torch.allclose(layer(x)[0], whole), "another step, other noise"
    layer.eval()
    torch.testing.assert_close(
        layer(x)[0].flatten(0, 1), moe_oracle(layer, x.flatten(0, 1))[0], rtol=1e-12, atol=1e-12
    )


def test_expert_without_tokens_has_zero_gradient_not_none() -> None:
    layer = make(4, [3, 5], 1)
    with torch.no_grad():
        layer.gate.weight_ED.copy_(torch.tensor([[9.0, 0, 0, 0], [-9.0, 0, 0, 0]]))
    x = torch.ones(6, 4, dtype=torch.float64)
    y, routing = layer(x)
    (y.sum() + routing.balance).backward()
    assert routing.counts_E.tolist() == [6, 0]
    for _, _, stack in layer.bank.stacks():
        assert stack.grad is not None
    assert not layer.bank.get_parameter("up_5").grad.any()  # pyright: ignore[reportOptionalMemberAccess]


def test_forward_stores_nothing_and_settle_stores_counts() -> None:
    layer = make(6, [4, 4, 4], 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    _, routing = layer(torch.randn(10, 6, dtype=torch.float64))
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    update_balance(layer, [routing.counts_E])
    assert torch.equal(layer.load_E, routing.counts_E)
    assert [name for name, _ in moe_layers(layer)] == [""]
    with pytest.raises(ValueError, match="2 MoE layers; the model has 1"):
        update_balance(layer, [routing.counts_E, routing.counts_E])


def test_initial_weights_depend_on_seed_name_and_id_alone() -> None:
    alone, mixed = make(6, [8, 8, 8], 2), make(6, [8, 4, 8], 2)
    torch.testing.assert_close(
        alone.bank.get_parameter("up_8")[0], mixed.bank.get_parameter("up_8")[0], rtol=0, atol=0
    )
    torch.testing.assert_close(
        alone.bank.get_parameter("up_8")[2], mixed.bank.get_parameter("up_8")[1], rtol=0, atol=0
    )
    other = make(6, [8, 8, 8], 2, seed=4)
    assert not torch.equal(alone.bank.get_parameter("up_8"), other.bank.get_parameter("up_8"))


def test_a_new_layer_is_initialised() -> None:
    """Of memory that nobody has filled, some tensors would be zero and others anything."""
    layer = MoELayer(64, [32, 48], 2)
    for parameter, std in [
        (layer.gate.weight_ED, 0.02),
        *((stack, stack.shape[1] ** -0.5) for _, _, stack in layer.bank.stacks()),
    ]:
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.3)
