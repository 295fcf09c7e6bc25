"""Blocks of ``transformers`` against our layer: outputs and every gradient, there and back, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from experts.interop import from_block, into_block
from experts.layer import MoELayer

WIDTH, HIDDEN = 10, 7
EAGER: dict[str, Any] = {"experts_implementation": "eager"}


def mixtral(
    experts: int = 5, top_k: int = 2, width: int = WIDTH, hidden: int = HIDDEN, **other: Any
) -> nn.Module:
    config = MixtralConfig(
        hidden_size=width, intermediate_size=hidden, num_local_experts=experts, num_experts_per_tok=top_k, **EAGER, **other
    )  # fmt: skip
    return filled(MixtralSparseMoeBlock(config))


def qwen(
    experts: int = 5,
    top_k: int = 2,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    normalise: bool = True,
    **other: Any,
) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=hidden, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=normalise,
        **EAGER, **other,
    )  # fmt: skip
    return filled(Qwen3MoeSparseMoeBlock(config))


def filled(block: nn.Module, seed: int = 5) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return block


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "qwen": qwen,
    "qwen, not normalised": lambda: qwen(normalise=False),
    "qwen, one of three": lambda: qwen(experts=3, top_k=1, normalise=False),
    "qwen, idle experts": lambda: qwen(experts=40, top_k=3),
}
every_block = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS.keys())


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x, target = torch.randn(2, 2, 6, WIDTH, dtype=dtype, generator=generator)
    return x, target


def loss_and_gradients(y: Tensor, target: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    loss = (y - target).square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, parameters))


def ours(layer: MoELayer) -> list[Tensor]:
    """In the order of ``theirs``, not in their layout."""
    stacks = {role: stack for _, role, stack in layer.bank.stacks()}
    return [layer.gate.weight_ED, stacks["up"], stacks["down"]]


def theirs(block: Any) -> list[Tensor]:
    return [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]


def transposed(gradients: list[Tensor]) -> list[Tensor]:
    x, router, up, down = gradients
    return [x, router, up.transpose(1, 2), down.transpose(1, 2)]


@every_block
def test_layer_computes_what_the_block_computes(make: Callable[[], nn.Module]) -> None:
    """In fp32, the precision of their routers: the loss to 1e-6, a gradient to 2e-6 of its norm and 1e-7 of the whole."""
    block = make()
    layer = from_block(block)
    x, target = inputs()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, gradients = loss_and_gradients(layer(mine)[0], target, [mine, *ours(layer)])
    expected, wanted = loss_and_gradients(block(other), target, [other, *theirs(block)])
    assert abs(loss - expected) <= 1e-6 * expected
    whole = torch.stack([gradient.norm() for gradient in wanted]).norm()
    for found, gradient in zip(transposed(gradients), wanted, strict=True):
        assert gradient.any()
        assert (found - gradient).norm() <= 2e-6 * gradient.norm() + 1e-7 * whole


@every_block
def test_experts_agree_to_the_last_digits(make: Callable[[], nn.Module]) -> None:
    """In fp64, with the routing of our gate: their routers round scores to fp32."""
    block: Any = make().double()
    layer = from_block(block)
    x, target = inputs(torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, gradients = loss_and_gradients(layer(mine)[0], target, [mine, *ours(layer)])
    with torch.no_grad():
        _, scores, chosen = block.gate(x)
    routing = layer(other)[1]
    assert torch.equal(routing.experts_TK, chosen)
    torch.testing.assert_close(routing.weights_TK, scores.double(), rtol=1e-6, atol=0)
    y = block.experts(other.view(-1, WIDTH), routing.experts_TK, routing.weights_TK).view_as(x)
    expected, wanted = loss_and_gradients(y, target, [other, layer.gate.weight_ED, *theirs(block)[1:]])
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for found, gradient in zip(transposed(gradients), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-14)


@every_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bitwise(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    block, empty = make().to(dtype), make().to(dtype)
    for parameter in empty.parameters():
        nn.init.zeros_(parameter)
    places = [parameter.data_ptr() for parameter in empty.parameters()]
    layer = from_block(block)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    into_block(layer, empty)
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, empty.state_dict()[name]), name
    assert [parameter.data_ptr() for parameter in empty.parameters()] == places


def test_weights_are_copied_not_shared() -> None:
    block: Any = mixtral()
    before = block.experts.down_proj.clone()
    layer = from_block(block)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(block.experts.down_proj, before)


def with_shared_expert() -> nn.Module:
    block = qwen()
    block.shared_expert = nn.Linear(2, 2)
    return block


def with_tensor(place: str, name: str, *shape: int) -> nn.Module:
    block = qwen()
    setattr(getattr(block, place), name, nn.Parameter(torch.zeros(shape)))
    return block


def with_router_of_its_own() -> nn.Module:
    class OtherRouter(nn.Module):
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, WIDTH))

    block = mixtral()
    block.gate = OtherRouter()
    return block


def interleaved() -> nn.Module:
    block: Any = mixtral()
    block.experts.is_concatenated = False
    return block


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Linear(3, 3),
            r"Linear holds bias, weight; needed were gate.weight, experts.gate_up_proj, experts.down_proj",
        ),
        (with_shared_expert, r"shared_expert.weight; needed were gate.weight, .* and nothing else"),
        (
            lambda: with_tensor("gate", "weight", 5),
            r"gate.weight has the shape \[5\]; \[experts, width\] was needed",
        ),
        (
            lambda: with_tensor("gate", "weight", 6, WIDTH),
            r"down_proj has the shape \[5, 10, 7\]; \[6, 10, 7\] was needed",
        ),
        (
            lambda: with_tensor("experts", "gate_up_proj", 5, WIDTH, 14),
            r"gate_up_proj has the shape \[5, 10, 14\]; \[5, 14, 10\]",
        ),
        (
            lambda: with_tensor("experts", "down_proj", 5, 9, 7),
            r"down_proj has the shape \[5, 9, 7\]; \[5, 10, 7\] was needed",
        ),
        (lambda: with_tensor("experts", "down_proj"), r"down_proj has the shape \[\]"),
        (
            interleaved,
            r"MixtralExperts is transposed or interleaved; stacks \[E, 2H, D\] with gate before value were needed",
        ),
        (lambda: mixtral(hidden_act="gelu"), r"activation is GELUActivation; SiLU was needed"),
        (lambda: mixtral(router_jitter_noise=0.1), r"trains with jitter_noise 0.1, .* set it to 0 first"),
        (
            with_router_of_its_own,
            r"the router is a OtherRouter; Mixtral's, or one with norm_topk_prob, was needed",
        ),
        (lambda: mixtral(top_k=1), r"gives its one expert per token the weight 1"),
    ],
)
def test_blocks_that_are_no_such_layer_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_block(make())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (MoELayer(8, [HIDDEN] * 5, 2), "width 8, where the block needs 10"),
        (
            MoELayer(WIDTH, [HIDDEN] * 4, 2),
            "experts 4, where the block needs 5; local experts 4, where the block needs 5",
        ),
        (
            MoELayer(WIDTH, [HIDDEN, 6, HIDDEN, 6, 6], 2),
            r"hidden sizes \[6, 7\], where the block needs \[7\]",
        ),
        (MoELayer(WIDTH, [HIDDEN] * 5, 3), "top_k 3, where the block needs 2"),
        (MoELayer(WIDTH, [HIDDEN] * 5, 2, normalise=False), "normalise False, where the block needs True"),
        (MoELayer(WIDTH, [HIDDEN] * 5, 2, kind="ffn"), "kind ffn, where the block needs swiglu"),
        (MoELayer(WIDTH, [HIDDEN] * 5, 2, scores="sigmoid"), "scores sigmoid, where the block needs softmax"),
        (
            MoELayer(WIDTH, [HIDDEN] * 5, 2, bias_rate=0.1, jitter=0.2),
            "bias_rate 0.1, where the block needs 0.0; jitter 0.2, where",
        ),
        (
            MoELayer(WIDTH, [HIDDEN] * 5, 2, capacity=1.5, shared=3),
            "capacity 1.5, where the block needs None; shared True, where",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused_and_nothing_is_written(layer: MoELayer, message: str) -> None:
    block = mixtral()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(ValueError, match=f"does not fit into the MixtralSparseMoeBlock: it has {message}"):
        into_block(layer, block)
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())


def test_a_host_that_holds_some_of_the_experts_is_refused() -> None:
    block = mixtral()
    layer = from_block(block)
    layer.bank = layer.bank.part([0, 3])
    with pytest.raises(ValueError, match="it has local experts 2, where the block needs 5"):
        into_block(layer, block)
