"""The layer against its oracle: outputs, losses, counts and every gradient, in fp64, at sizes that divide nothing."""

from __future__ import annotations

import pytest
import torch

from experts.layer import MoELayer
from experts.load import moe_layers, settle
from experts.model import initialise
from tests.support.oracle import moe_oracle

CASES = [  # width, sizes, top_k, tokens
    (5, [7], 1, 3),
    (6, [4, 4, 4], 2, 11),
    (7, [3, 9, 3, 5, 9], 2, 13),
    (4, [8] * 17, 3, 5),  # more experts than tokens: most get none
    (8, [2, 6], 2, 0),  # no tokens at all
]


def make(width: int, sizes: list[int], top_k: int, seed: int = 3) -> MoELayer:
    layer = MoELayer(width, sizes, top_k).double()
    initialise(layer, seed)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(50)  # decided gates: no ties, and uneven loads
    return layer


@pytest.mark.parametrize(("width", "sizes", "top_k", "tokens"), CASES)
def test_layer_equals_oracle(width: int, sizes: list[int], top_k: int, tokens: int) -> None:
    layer = make(width, sizes, top_k)
    layer.load_E.copy_(torch.arange(1, len(sizes) + 1))
    x = torch.randn(tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, routing = layer(x)
    expected, balance, z, counts = moe_oracle(layer, x)
    assert routing.counts_E.tolist() == counts
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routing.balance, balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.z, z, rtol=1e-12, atol=1e-300)
    parameters = [x, *layer.parameters()]
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    ours = torch.autograd.grad((y * weight).sum() + 0.3 * routing.balance + 0.1 * routing.z, parameters)
    theirs = torch.autograd.grad((expected * weight).sum() + 0.3 * balance + 0.1 * z, parameters, allow_unused=True)
    for mine, other, parameter in zip(ours, theirs, parameters, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(parameter) if other is None else other, rtol=1e-10, atol=1e-12)


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
    settle(layer, [routing.counts_E])
    assert torch.equal(layer.load_E, routing.counts_E)
    assert [name for name, _ in moe_layers(layer)] == [""]
    with pytest.raises(ValueError, match="2 MoE layers; the model has 1"):
        settle(layer, [routing.counts_E, routing.counts_E])


def test_initial_weights_depend_on_seed_name_and_id_alone() -> None:
    alone, mixed = make(6, [8, 8, 8], 2), make(6, [8, 4, 8], 2)
    torch.testing.assert_close(alone.bank.get_parameter("up_8")[0], mixed.bank.get_parameter("up_8")[0], rtol=0, atol=0)
    torch.testing.assert_close(alone.bank.get_parameter("up_8")[2], mixed.bank.get_parameter("up_8")[1], rtol=0, atol=0)
    other = make(6, [8, 8, 8], 2, seed=4)
    assert not torch.equal(alone.bank.get_parameter("up_8"), other.bank.get_parameter("up_8"))
