"""The layer against its oracle: outputs, losses, counts and every gradient, in fp64, at sizes that
divide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experts.balance import moe_layers, update_balance
from experts.model import attach, initialise
from experts.moe.context import MoEContext, StepContext
from experts.moe.gate import noise
from experts.moe.layer import MoELayer
from harness.moe.oracle import moe_oracle

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


def make_layer(
    width: int,
    sizes: list[int],
    top_k: int,
    seed: int = 3,
    **options: Any,
) -> MoELayer:
    layer = MoELayer(width, sizes, top_k, **options).double()
    initialise(layer, seed)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(50)  # decided gates: no ties, and uneven loads
        layer.gate.bias_E.copy_(1.2 * torch.cos(2.0 * torch.arange(len(sizes))))
        layer.load_E.copy_(torch.arange(1, len(sizes) + 1))
    return layer


def make_layer_with_one_favourite(**options: Any) -> MoELayer:
    """A layer whose first expert gets every token with a positive first feature."""
    layer = make_layer(4, [3, 5], 1, **options)
    with torch.no_grad():
        layer.gate.weight_ED.copy_(torch.tensor([[9.0, 0, 0, 0], [-9.0, 0, 0, 0]]))
    return layer


def make_tokens(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# --- the oracle


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("width", "sizes", "top_k", "tokens"), SHAPES)
def test_layer_equals_oracle(
    width: int,
    sizes: list[int],
    top_k: int,
    tokens: int,
    name: str,
) -> None:
    layer = make_layer(width, sizes, top_k, **OPTIONS[name])
    attach(layer, MoEContext(step=StepContext(seed=12345)))
    x_TD = make_tokens(tokens, width).requires_grad_()
    y_TD, routing = layer(x_TD)
    noise_TD = None
    if layer.jitter:
        noise_TD = noise(12345 + layer.layer_id, torch.arange(tokens), width, layer.jitter, torch.float64)
    expected_TD, balance, z, counts = moe_oracle(layer, x_TD, noise_TD)
    assert routing.counts_E.tolist() == counts
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routing.balance, balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.z, z, rtol=1e-12, atol=1e-300)
    parameters = [x_TD, *layer.parameters()]
    weight_TD = torch.linspace(-1, 1, y_TD.numel(), dtype=torch.float64).view_as(y_TD)
    loss = (y_TD * weight_TD).sum() + 0.3 * routing.balance + 0.1 * routing.z
    expected_loss = (expected_TD * weight_TD).sum() + 0.3 * balance + 0.1 * z
    gradients = torch.autograd.grad(loss, parameters)
    expected_gradients = torch.autograd.grad(expected_loss, parameters, allow_unused=True)
    for parameter, gradient, expected in zip(parameters, gradients, expected_gradients, strict=True):
        expected = torch.zeros_like(parameter) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option_changes_the_output(name: str) -> None:
    """Otherwise the cases above would prove less than they seem to."""
    x_TD = make_tokens(11, 6)
    plain_TD, _ = make_layer(6, [4, 4, 4], 2)(x_TD)
    other_TD, _ = make_layer(6, [4, 4, 4], 2, **OPTIONS[name])(x_TD)
    assert not torch.allclose(plain_TD, other_TD, rtol=1e-3)


# --- options


def test_the_bias_changes_the_choice_but_neither_weights_nor_losses() -> None:
    x_TD = make_tokens(40, 7)
    plain = make_layer(7, [4] * 5, 2, normalise=False)
    biased = make_layer(7, [4] * 5, 2, normalise=False, bias_rate=0.1)
    _, before = plain(x_TD)
    _, after = biased(x_TD)
    assert not torch.equal(before.experts_TK, after.experts_TK)
    scores_TE = (x_TD @ biased.gate.weight_ED.t()).softmax(-1)
    torch.testing.assert_close(after.weights_TK, scores_TE.gather(1, after.experts_TK), rtol=1e-13, atol=0)
    assert torch.equal(before.balance, after.balance)
    assert torch.equal(before.z, after.z)


def test_a_dropped_token_gets_the_output_of_the_shared_expert_only() -> None:
    """Four tokens choose one expert, whose capacity is two: it takes the first two."""
    layer = make_layer_with_one_favourite(capacity=1.0, shared=3)
    x_TD = make_tokens(4, 4).abs().requires_grad_()
    y_TD, routing = layer(x_TD)
    assert layer.shared is not None
    shared_TD = layer.shared(x_TD)
    assert routing.counts_E.tolist() == [4, 0], "the gate counts its choices, dropped ones included"
    torch.testing.assert_close(y_TD[2:], shared_TD[2:], rtol=1e-13, atol=0)
    assert not torch.isclose(y_TD[:2], shared_TD[:2]).any()
    up = layer.bank.get_parameter("up_3")
    assert not torch.autograd.grad(y_TD[2:].sum(), up, retain_graph=True)[0].any()
    assert torch.autograd.grad(y_TD[:2].sum(), up)[0].any()


# --- jitter


def forward_at(layer: MoELayer, x: Tensor, step: StepContext) -> Tensor:
    with layer.context.use_step(step):
        y, _ = layer(x)
    return y


def test_jitter_depends_on_the_step_and_the_global_position() -> None:
    layer = make_layer(6, [4, 4, 4], 2, jitter=0.9)
    x = make_tokens(5, 3, 6)
    whole = forward_at(layer, x, StepContext(seed=7))
    parts = [
        forward_at(layer, x[begin:end], StepContext(seed=7, first_sample=begin))
        for begin, end in ((0, 2), (2, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)
    misplaced = forward_at(layer, x[2:], StepContext(seed=7))
    assert not torch.allclose(misplaced, whole[2:])
    assert not torch.allclose(forward_at(layer, x, StepContext(seed=8)), whole)


@pytest.mark.parametrize("bounds", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 5)]])
def test_jitter_is_the_same_for_flattened_input(bounds: list[tuple[int, int]]) -> None:
    """A model may flatten its tokens to (batch * sequence, width): then only the step context
    counts samples."""
    layer = make_layer(6, [4, 4, 4], 2, jitter=0.9)
    x = make_tokens(5, 3, 6)
    whole = forward_at(layer, x, StepContext(seed=7))
    for begin, end in bounds:
        step = StepContext(seed=7, first_sample=begin, num_samples=end - begin)
        flat = forward_at(layer, x[begin:end].flatten(0, 1), step)
        torch.testing.assert_close(flat, whole[begin:end].flatten(0, 1), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            forward_at(layer, x[begin:end], step), whole[begin:end], rtol=1e-13, atol=1e-13
        )


def test_there_is_no_jitter_in_evaluation() -> None:
    layer = make_layer(6, [4, 4, 4], 2, jitter=0.9).eval()
    x_TD = make_tokens(15, 6)
    expected_TD, *_ = moe_oracle(layer, x_TD)
    y_TD = forward_at(layer, x_TD, StepContext(seed=7))
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-12, atol=1e-12)


# --- state and initial weights


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    """Zero and not None: optimizers skip parameters without a gradient."""
    layer = make_layer_with_one_favourite()
    y_TD, routing = layer(torch.ones(6, 4, dtype=torch.float64))
    (y_TD.sum() + routing.balance).backward()
    assert routing.counts_E.tolist() == [6, 0]
    for _, _, stack in layer.bank.stacks():
        assert stack.grad is not None
    assert not layer.bank.get_parameter("up_5").grad.any()  # pyrefly: ignore[missing-attribute]


def test_forward_changes_no_state_and_update_balance_stores_counts() -> None:
    layer = make_layer(6, [4, 4, 4], 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    _, routing = layer(make_tokens(10, 6))
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    update_balance(layer, [routing.counts_E])
    assert torch.equal(layer.load_E, routing.counts_E)
    assert [name for name, _ in moe_layers(layer)] == [""]
    with pytest.raises(ValueError, match="2 MoE layers; the model has 1"):
        update_balance(layer, [routing.counts_E, routing.counts_E])


def test_initial_weights_depend_on_seed_name_and_id_only() -> None:
    alike = make_layer(6, [8, 8, 8], 2).bank.get_parameter("up_8")
    mixed = make_layer(6, [8, 4, 8], 2).bank.get_parameter("up_8")
    torch.testing.assert_close(alike[0], mixed[0], rtol=0, atol=0)
    torch.testing.assert_close(alike[2], mixed[1], rtol=0, atol=0)
    other_seed = make_layer(6, [8, 8, 8], 2, seed=4).bank.get_parameter("up_8")
    assert not torch.equal(alike, other_seed)


def test_a_new_layer_is_initialised() -> None:
    """Uninitialised memory would be zero in some tensors and arbitrary in others."""
    layer = MoELayer(64, [32, 48], 2)
    expected_std = {layer.gate.weight_ED: 0.02}
    for _, _, stack in layer.bank.stacks():
        expected_std[stack] = stack.shape[1] ** -0.5
    for parameter, std in expected_std.items():
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.3)
