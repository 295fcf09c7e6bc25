"""Adapters beside packed weights, in one process and on hosts, against adapters beside the numbers that the
packed ones stand for, in fp64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from experts.balance import moe_layers
from experts.kernels.packed_product import PackedLinear
from experts.transformers.lora.adapters import merge_lora
from experts.transformers.lora.packing import counts_of_numbers, pack_frozen
from experts.transformers.registration import restore, use
from experts.types import Packing
from harness.hosts.ranks import run_ranks
from harness.lm.families import build, tokens
from harness.lm.lora_runs import LoraRun, LoraTask, PackedOptions, lora_on_hosts, train_lora, worst
from orchestrator.train.group.world import World

FAMILIES = ("Qwen3-MoE", "GPT-OSS", "DeepSeek-V3")
"""Of the usual layout; transposed and interleaved with biases; with shared experts and latent attention."""


def options(packing: Packing = "nf4", whole: bool = False) -> PackedOptions:
    return PackedOptions(rank=3, alpha=5.0, packing=packing, whole=whole)


@cache
def expected(name: str, packing: Packing = "nf4") -> LoraRun:
    return train_lora(name, World.single_process(), options=options(packing, whole=True))


def check(found: list[LoraRun], run: LoraRun) -> None:
    assert found[0].losses == pytest.approx(run.losses, rel=1e-10)
    gradients = {name: tensor for each in found for name, tensor in each.gradients.items()}
    weights = {name: tensor for each in found for name, tensor in each.weights.items()}
    assert worst(gradients, run.gradients) <= 1e-10
    assert worst(weights, run.weights) <= 1e-9


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("packing", ["nf4", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_weights_train_as_the_numbers_they_stand_for(name: str, packing: Packing) -> None:
    check([train_lora(name, World.single_process(), options=options(packing))], expected(name, packing))


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("hosts", [3, 2])
def test_hosts_train_as_one_process(hosts: int) -> None:
    """The hosts have unequal numbers of experts, and one none in a layer."""
    names = FAMILIES[:2] if hosts == 3 else FAMILIES[2:]
    ranks = run_ranks(lora_on_hosts, hosts, names, False, options())
    for name in names:
        check([runs[name] for runs in ranks], expected(name))


def test_experts_move_as_packed_bytes() -> None:
    ranks = run_ranks(lora_on_hosts, 2, ["GPT-OSS"], True, options())
    run = expected("GPT-OSS")
    assert ranks[0]["GPT-OSS"].losses == pytest.approx(run.losses, rel=1e-10)
    weights = {name: tensor for host in ranks for name, tensor in host["GPT-OSS"].weights.items()}
    assert worst(weights, run.weights) <= 1e-9


def test_weights_lose_something_by_packing() -> None:
    """Otherwise the tests above would compare a run with itself."""
    whole = train_lora("Qwen3-MoE", World.single_process())
    assert all(abs(a - b) > 1e-6 for a, b in zip(whole.losses, expected("Qwen3-MoE").losses, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_linear_layers_but_routers_and_the_output_are_packed(name: str) -> None:
    model = LoraTask(name, options=options()).build_model()
    linears = {
        key.removesuffix(".base_layer") for key, m in model.named_modules() if isinstance(m, PackedLinear)
    }
    assert linears
    assert not [key for key in linears if key.endswith(("lm_head", ".gate", "router"))]
    assert all(layer.bank.form.packing == "nf4" for _, layer in moe_layers(model))
    whole = use(build(name))
    counts = counts_of_numbers(model)
    packed = {key: counts[p] for key, p in model.named_parameters() if p.dtype == torch.uint8}
    sizes = {key.replace(".base_layer.", "."): count for key, count in packed.items()}
    assert sizes == {key: p.numel() for key, p in whole.named_parameters() if key in sizes}
    assert len(sizes) == len(linears) + 2 * len(list(moe_layers(model)))


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(64, 64)
        self.dt_proj = nn.Linear(64, 64)
        self.own = OwnForward(64, 64)

    def get_output_embeddings(self) -> None:
        return None


def test_linear_layers_whose_weight_is_read_elsewhere_stay_whole() -> None:
    model = pack_frozen(Mixer(), "nf4")
    packed = [name for name, module in model.named_children() if isinstance(module, PackedLinear)]
    assert packed == ["plain"]
    with pytest.raises(TypeError, match=r"numbers of type torch.uint8.* needs whole frozen weights"):
        model.plain(torch.ones(2, 64, dtype=torch.uint8))


def test_merged_adapters_compute_what_packed_weights_and_adapters_did() -> None:
    model = LoraTask("Qwen3-MoE", options=options()).build_model()
    logits = model(input_ids=tokens(3)).logits
    merged = restore(merge_lora(model).double())
    assert not [p for p in merged.parameters() if p.dtype == torch.uint8]
    torch.testing.assert_close(merged(input_ids=tokens(3)).logits, logits, rtol=1e-5, atol=1e-6)


def test_a_packed_model_is_not_restored() -> None:
    with pytest.raises(ValueError, match=r"weights in nf4; call .*merge_lora before restore"):
        restore(pack_frozen(use(build("Qwen3-MoE")), "nf4"))
