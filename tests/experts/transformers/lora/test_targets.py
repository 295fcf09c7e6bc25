"""Names and words for the matrices that get adapters."""

from __future__ import annotations

import pytest
import torch
import transformers

from experts.transformers.lora.targets import (
    Targets,
    expert_parameters,
    find_targets,
    linear_names,
    peft_names,
    short_names,
)
from experts.transformers.registration import use
from harness.lm.families import COMMON, FAMILIES, build

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BOTH = ("up", "down")


def leaves(targets: Targets) -> set[str]:
    return {name.rpartition(".")[2] for name in targets.linears}


@pytest.mark.parametrize("name", FAMILIES)
def test_by_default_no_router_and_no_output_gets_an_adapter(name: str) -> None:
    targets = find_targets(use(build(name)), ())
    assert targets.matrices == BOTH
    assert targets.linears
    assert not [each for each in targets.linears if each.endswith((".gate", "_gate", "lm_head", "router"))]


def test_a_dense_model_has_adapters_on_all_linear_layers_but_the_output() -> None:
    config = transformers.LlamaConfig(**COMMON)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    targets = find_targets(model, ())
    assert leaves(targets) == {*ATTENTION, "gate_proj", "up_proj", "down_proj"}
    assert targets.matrices == ()


@pytest.mark.parametrize(
    ("given", "linears", "matrices"),
    [
        (("attention",), ATTENTION, ()),
        (("q_proj", "self_attn.v_proj"), ("q_proj", "v_proj"), ()),
        (("experts",), (), BOTH),
        (("experts.down_proj", "k_proj"), ("k_proj",), ("down",)),
        (("mlp.experts.gate_up_proj",), (), ("up",)),
        (("lm_head",), ("lm_head",), ()),
    ],
    ids=str,
)
def test_targets_are_names_and_words(
    given: tuple[str, ...], linears: tuple[str, ...], matrices: tuple[str, ...]
) -> None:
    found = find_targets(use(build("Qwen3-MoE")), given)
    assert leaves(found) == set(linears)
    assert found.matrices == matrices


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"named 'c_attn'; it has experts, .*experts\.down_proj.*q_proj"):
        find_targets(use(build("Qwen3-MoE")), ("c_attn",))


def gpt2() -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2))


@pytest.mark.parametrize(
    "given", [(), ("all-linear",), ("attention",), ("c_attn",), ("attn.c_proj",)], ids=str
)
def test_layers_of_type_conv1d_are_refused_by_their_type(given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel can have no adapters on") as caught:
        find_targets(gpt2(), given)
    assert "its layers c_attn, c_fc, c_proj are Conv1D, which adapters do not support" in str(caught.value)
    assert "it has" not in str(caught.value)


def test_words_that_would_be_refused_are_not_offered() -> None:
    with pytest.raises(ValueError, match=r"named 'q_proj'; it has lm_head$"):
        find_targets(gpt2(), ("q_proj",))


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-Next"])
def test_dense_blocks_and_shared_experts_get_adapters_where_peft_reads_them_as_routed_ones(name: str) -> None:
    model = use(build(name))
    targets = find_targets(model, ())
    usual = {each for each in linear_names(model) if not each.endswith(("lm_head", ".shared_expert_gate"))}
    assert set(targets.linears) == usual
    modules, weights = peft_names(model, targets.linears)
    assert weights == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    assert not {"down_proj", "gate_proj", "up_proj"} & set(modules)
    chosen = find_targets(model, (targets.linears[-1],)).linears
    assert peft_names(model, chosen) == ([], [f"{targets.linears[-1]}.weight"])


def test_names_for_peft_are_short_unless_they_stand_for_other_layers_too() -> None:
    model = use(build("Qwen3-MoE"))
    all_queries = [name for name, _ in model.named_modules() if name.endswith("q_proj")]
    assert short_names(all_queries, model) == ["q_proj"]
    assert short_names(all_queries[:1], model) == ["model.layers.0.self_attn.q_proj"]


def test_parameters_of_experts_have_one_name_in_all_layers() -> None:
    found = expert_parameters(use(build("Granite-MoE")), BOTH)
    assert found == ["block_sparse_moe.experts.down_proj", "block_sparse_moe.experts.gate_up_proj"]
