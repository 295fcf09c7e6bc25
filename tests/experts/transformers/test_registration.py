"""Models of ``transformers`` with our experts, in one process: conversion, its refusals, and its undoing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

import experts.transformers
from experts.balance import moe_layers
from experts.model import attach, place
from experts.moe.context import MoEContext
from experts.tokens.exchange import LocalExchange
from experts.transformers.hosted import HostedExperts
from experts.transformers.registration import restore, use
from harness.lm.families import COMMON, FAMILIES, build, copied, next_token_loss, tokens


def gradients(model: nn.Module) -> dict[str, Any]:
    model.zero_grad()
    total, count = next_token_loss(model, tokens(4))
    (total / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_names_of_experts_are_those_of_our_layers() -> None:
    model = experts.transformers.use(build("Qwen3-MoE"))
    names = [name for name, _ in moe_layers(model)]
    assert names == [f"model.layers.{layer}.mlp.experts.hosted" for layer in range(2)]
    assert [layer.layer_name for _, layer in moe_layers(model)] == names
    assert model.config._experts_implementation == "expert_orchestrator"


def test_swiglu_experts_take_the_fused_kernels_and_others_their_own_activation() -> None:
    forms = {name: moe_layers(use(build(name)))[0][1].bank.form for name in ("Mixtral", "GPT-OSS")}
    assert forms["Mixtral"].is_plain
    assert forms["GPT-OSS"].bias
    assert forms["GPT-OSS"].activation is not None


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-OSS"])
def test_restore_gives_the_model_back_as_it_was(name: str) -> None:
    model = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected = gradients(model)
    assert restore(use(model)) is model
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert model.config._experts_implementation == "eager"
    assert all(torch.equal(gradient, expected[key]) for key, gradient in gradients(model).items())


def test_frozen_experts_stay_frozen() -> None:
    model = build("Mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    use(model)
    assert not any(p.requires_grad for p in moe_layers(model)[0][1].bank.parameters())


def test_a_second_use_changes_nothing() -> None:
    model = use(build("Mixtral"))
    layers = moe_layers(model)
    assert moe_layers(use(model)) == layers


def test_a_model_without_memory_is_converted_too() -> None:
    with torch.device("meta"):
        model = type(build("Mixtral"))(build("Mixtral").config)
    ((_, layer), _) = moe_layers(use(model))
    assert {parameter.device.type for parameter in layer.bank.parameters()} == {"meta"}
    assert layer.load_E.device.type == layer.bank.slot_E.device.type == "cpu"


def test_a_dense_model_is_refused() -> None:
    sizes = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"}
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM has no experts; .* A dense model trains as it is"
    ):
        use(LlamaForCausalLM(LlamaConfig(**sizes)))


def test_llama_4_is_refused_because_its_router_scales_the_inputs() -> None:
    sizes: dict[str, Any] = {**COMMON, "num_local_experts": 4, "intermediate_size_mlp": 12, "head_dim": 8}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes))
    with pytest.raises(
        ValueError, match=r"Llama4TextExperts, which the experts interface .* does not dispatch"
    ):
        use(model)


def test_unknown_parameters_are_refused_before_anything_is_changed() -> None:
    model = build("Mixtral")
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match="holds down_proj, gate_up_proj, scale; needed were down_proj"):
        use(model)
    assert model.config._experts_implementation == "eager"
    assert not moe_layers(model)


def test_two_models_with_one_config_are_told_apart() -> None:
    model = build("Mixtral")
    other = type(model)(model.config).double()
    use(model)
    with pytest.raises(ValueError, match=r"shares a config with one that experts\.transformers\.use changed"):
        next_token_loss(other, tokens(1))


def test_a_model_with_experts_on_other_hosts_is_not_restored() -> None:
    model = use(build("Mixtral"))
    place(model, [[0, 1, 0, 1, 0, 1, 0]] * 2, 0)
    with pytest.raises(ValueError, match="this host holds 4 of 7 experts; restore needs all of them"):
        restore(model)


def test_without_transformers_the_message_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Mixtral")
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"needs transformers 5.17 or later .*expert-orchestrator\[hf\]"):
        use(model)


def test_unknown_names_of_the_package_list_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'unuse'; it has .*, read_weights, restore, "):
        experts.transformers.unuse  # noqa: B018


def test_routing_is_replayed_where_a_pass_is_recomputed() -> None:
    """A recomputed router that chooses other experts does not change the gradients."""
    from experts.moe.context import RecomputeCache

    model = use(build("Mixtral"))
    (_, layer), _ = moe_layers(model)
    assert isinstance(layer, HostedExperts)
    x_TD = torch.randn(5, 16, dtype=torch.float64)
    weights_TK = torch.full((5, 2), 0.5, dtype=torch.float64)
    first_TK = torch.tensor([[0, 1]] * 5)
    cache = RecomputeCache()
    with cache.recording(layer.context):
        expected = layer(x_TD, first_TK, weights_TK)
    with cache.replaying(layer.context):
        replayed = layer(x_TD, first_TK + 1, weights_TK)
    assert torch.equal(replayed, expected)
    assert layer.counts_E.tolist() == [5, 5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copied_model_keeps_its_own_activation(name: str) -> None:
    model = use(build(name))
    (_, layer), *_ = moe_layers(copied(model))
    activation: Any = layer.bank.form.activation
    assert activation is None or activation.__self__.hosted is layer


def test_outputs_without_router_logits_are_refused() -> None:
    model = use(build("Mixtral"))
    outputs = model(input_ids=tokens(1))
    with pytest.raises(ValueError, match="call it with output_router_logits=True"):
        experts.transformers.balance_loss(model, outputs.router_logits)


def test_the_passes_of_one_micro_batch_count_themselves() -> None:
    model = use(build("Mixtral"))
    outputs = model(input_ids=tokens(3), output_router_logits=True)
    loss = experts.transformers.balance_loss(model, outputs.router_logits)
    torch.testing.assert_close(loss.float(), outputs.aux_loss.float())


class TwoHosts(LocalExchange):
    """Another host has as many rows, all of the first expert."""

    size = 2

    def all_to_all_counts(self, counts_NC: torch.Tensor, header: Sequence[int]) -> torch.Tensor:
        del header
        others = torch.zeros_like(counts_NC[0])
        others[0] = counts_NC[0, :-1].sum()
        others[-1] = counts_NC[0, -1]
        return torch.stack([counts_NC[0], others])


def test_a_micro_batch_that_is_computed_by_itself_counts_its_own_choices() -> None:
    """With --reproducible the other hosts compute other micro-batches at the same time."""
    model = use(build("Mixtral"))
    outputs = model(input_ids=tokens(3), output_router_logits=True)
    alone = experts.transformers.balance_loss(model, outputs.router_logits)
    together, by_itself = MoEContext(TwoHosts()), MoEContext(TwoHosts(), by_choice=True)
    attach(model, together)
    assert experts.transformers.balance_loss(model, outputs.router_logits) != alone
    attach(model, by_itself)
    assert torch.equal(experts.transformers.balance_loss(model, outputs.router_logits), alone)
