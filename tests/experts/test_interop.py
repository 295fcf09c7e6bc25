"""Blocks of ``transformers`` against our layer: outputs and every gradient, both conversions, and
refused blocks."""

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

WIDTH = 10
HIDDEN = 7
EAGER: dict[str, Any] = {"experts_implementation": "eager"}


def mixtral(
    experts: int = 5,
    top_k: int = 2,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    **other: Any,
) -> nn.Module:
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        **EAGER,
        **other,
    )
    return initialised(MixtralSparseMoeBlock(config))


def qwen(
    experts: int = 5,
    top_k: int = 2,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    normalise: bool = True,
    **other: Any,
) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=hidden,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalise,
        **EAGER,
        **other,
    )
    return initialised(Qwen3MoeSparseMoeBlock(config))


def initialised(block: nn.Module, seed: int = 5) -> nn.Module:
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


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """An input for the layer, the same for the block, and a target."""
    generator = torch.Generator().manual_seed(9)
    x, target = torch.randn(2, 2, 6, WIDTH, dtype=dtype, generator=generator)
    return x.clone().requires_grad_(), x.clone().requires_grad_(), target


def loss_and_gradients(
    y: Tensor,
    target: Tensor,
    inputs: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    loss = (y - target).square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, inputs))


def layer_parameters(layer: MoELayer) -> list[Tensor]:
    """In the order of ``block_parameters``, in our layout."""
    stacks = {role: stack for _, role, stack in layer.bank.stacks()}
    return [layer.gate.weight_ED, stacks["up"], stacks["down"]]


def block_parameters(block: Any) -> list[Tensor]:
    return [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]


def in_block_layout(gradients: list[Tensor]) -> list[Tensor]:
    x, router, up, down = gradients
    return [x, router, up.transpose(1, 2), down.transpose(1, 2)]


@every_block
def test_the_layer_equals_the_block_in_fp32(make: Callable[[], nn.Module]) -> None:
    """The precision of their routers: the loss to 1e-6, a gradient to 2e-6 of its norm and 1e-7 of
    the global norm."""
    block = make()
    layer = from_block(block)
    layer_x, block_x, target = make_inputs()
    y, _ = layer(layer_x)
    loss, gradients = loss_and_gradients(y, target, [layer_x, *layer_parameters(layer)])
    expected_loss, expected = loss_and_gradients(block(block_x), target, [block_x, *block_parameters(block)])
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    global_norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    for ours, theirs in zip(in_block_layout(gradients), expected, strict=True):
        assert theirs.any()
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm() + 1e-7 * global_norm


@every_block
def test_the_experts_equal_those_of_the_block_in_fp64(make: Callable[[], nn.Module]) -> None:
    """With the routing of our gate: their routers round scores to fp32."""
    block: Any = make().double()
    layer = from_block(block)
    layer_x, block_x, target = make_inputs(torch.float64)
    y, _ = layer(layer_x)
    loss, gradients = loss_and_gradients(y, target, [layer_x, *layer_parameters(layer)])
    with torch.no_grad():
        _, scores, chosen = block.gate(block_x)
    _, routing = layer(block_x)
    assert torch.equal(routing.experts_TK, chosen)
    torch.testing.assert_close(routing.weights_TK, scores.double(), rtol=1e-6, atol=0)
    flat_y = block.experts(block_x.view(-1, WIDTH), routing.experts_TK, routing.weights_TK)
    inputs = [block_x, layer.gate.weight_ED, *block_parameters(block)[1:]]
    expected_loss, expected = loss_and_gradients(flat_y.view_as(block_x), target, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for ours, theirs in zip(in_block_layout(gradients), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@every_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_conversions_together_are_exact(
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
) -> None:
    block = make().to(dtype)
    target = make().to(dtype)
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    layer = from_block(block)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    into_block(layer, target)
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    assert [parameter.data_ptr() for parameter in target.parameters()] == addresses


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


def with_tensor(module: str, name: str, *shape: int) -> nn.Module:
    block = qwen()
    setattr(getattr(block, module), name, nn.Parameter(torch.zeros(shape)))
    return block


def with_unknown_router() -> nn.Module:
    class OtherRouter(nn.Module):
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, WIDTH))

    block = mixtral()
    block.gate = OtherRouter()
    return block


def with_interleaved_stacks() -> nn.Module:
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
            with_interleaved_stacks,
            r"MixtralExperts is transposed or interleaved; stacks \[E, 2H, D\] with gate before "
            r"value were needed",
        ),
        (lambda: mixtral(hidden_act="gelu"), r"activation is GELUActivation; SiLU was needed"),
        (lambda: mixtral(router_jitter_noise=0.1), r"trains with jitter_noise 0.1, .* set it to 0 first"),
        (
            with_unknown_router,
            r"the router is a OtherRouter; Mixtral's, or one with norm_topk_prob, was needed",
        ),
        (lambda: mixtral(top_k=1), r"gives its one expert per token the weight 1"),
    ],
)
def test_unsupported_blocks_are_refused(make: Callable[[], nn.Module], message: str) -> None:
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
def test_layers_that_do_not_fit_are_refused_and_nothing_is_written(
    layer: MoELayer,
    message: str,
) -> None:
    block = mixtral()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(ValueError, match=f"does not fit into the MixtralSparseMoeBlock: it has {message}"):
        into_block(layer, block)
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())


def test_a_layer_with_some_of_the_experts_is_refused() -> None:
    block = mixtral()
    layer = from_block(block)
    layer.bank = layer.bank.part([0, 3])
    with pytest.raises(ValueError, match="it has local experts 2, where the block needs 5"):
        into_block(layer, block)
