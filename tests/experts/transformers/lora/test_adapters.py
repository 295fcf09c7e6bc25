"""Adapters of ours, in one process and on three hosts, against those of PEFT in one process, in fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from experts.expert_state import stacked_names
from experts.model import place
from experts.moe.token_dropout import token_dropouts
from experts.transformers.lora.adapters import (
    LoraOptions,
    add_lora,
    count_adapted,
    initialise_lora,
    merge_lora,
    shorten_frozen,
    without_adapters,
)
from experts.transformers.lora.targets import find_targets
from experts.transformers.registration import restore, use
from harness.hosts.ranks import run_ranks
from harness.lm.families import EXPERTS, FAMILIES, build, tokens
from harness.lm.lora_runs import (
    OPTIONS,
    LoraRun,
    LoraTask,
    in_peft_names,
    lora_in_data_parallel,
    lora_on_hosts,
    train_lora,
    train_peft,
    worst,
)
from harness.runs.host_runs import by_expert
from orchestrator.train.group.world import World


@cache
def peft_run(name: str) -> LoraRun:
    return train_peft(name)


@cache
def on_hosts(name: str) -> list[dict[str, LoraRun]]:
    return run_ranks(lora_on_hosts, 3, [name])


def runs(name: str, hosts: int) -> list[LoraRun]:
    if hosts == 1:
        return [train_lora(name, World.single_process())]
    return [ranks[name] for ranks in on_hosts(name)]


@pytest.mark.extended(but_first=3)
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_equal_those_of_peft(name: str, hosts: int) -> None:
    expected = peft_run(name)
    found = runs(name, hosts)
    assert found[0].losses == pytest.approx(expected.losses, rel=1e-10)
    assert worst(in_peft_names([run.gradients for run in found]), expected.gradients) <= 1e-10
    assert worst(in_peft_names([run.weights for run in found]), expected.weights) <= 1e-9


def test_adapters_move_between_hosts_with_their_optimizer_state() -> None:
    hosts = [ranks["GPT-OSS"] for ranks in run_ranks(lora_on_hosts, 2, ["GPT-OSS"], True)]
    expected = peft_run("GPT-OSS")
    assert hosts[0].losses == pytest.approx(expected.losses, rel=1e-10)
    assert worst(in_peft_names([run.weights for run in hosts]), expected.weights) <= 1e-9
    moved = "model.layers.0.mlp.experts.hosted.bank.0.up_lora_b"
    assert [moved in host.weights for host in hosts] == [False, True]


@pytest.mark.extended
def test_workers_in_data_parallel_train_the_adapters_of_one_process() -> None:
    """Three workers share a batch of five samples. Each has all experts."""
    workers = run_ranks(lora_in_data_parallel, 3, "Qwen3-MoE")
    expected = peft_run("Qwen3-MoE")
    assert workers[0].losses == pytest.approx(expected.losses, rel=1e-10)
    for worker in workers:
        assert worst(in_peft_names([worker.weights]), expected.weights) <= 1e-9


@pytest.mark.extended
def test_dropout_is_the_same_on_hosts_and_in_micro_batches_of_any_size() -> None:
    options = replace(OPTIONS, dropout=0.4)
    expected = train_lora("DeepSeek-V3", World.single_process(), options=options)
    hosts = [ranks["DeepSeek-V3"] for ranks in run_ranks(lora_on_hosts, 2, ["DeepSeek-V3"], False, options)]
    whole = train_lora("DeepSeek-V3", World.single_process(), options=options, micro_batch=5)
    for found in (hosts, [whole]):
        assert found[0].losses == pytest.approx(expected.losses, rel=1e-10)
        weights = in_peft_names([run.weights for run in found])
        assert worst(weights, in_peft_names([expected.weights])) <= 1e-9
    without = train_lora("DeepSeek-V3", World.single_process())
    assert all(abs(a - b) > 1e-4 for a, b in zip(expected.losses, without.losses, strict=True))


def test_a_model_with_dropout_is_evaluated_without_it() -> None:
    model = LoraTask("DeepSeek-V3", options=replace(OPTIONS, dropout=0.4)).build_model()
    without = LoraTask("DeepSeek-V3").build_model()
    assert len(token_dropouts(model)) == len(find_targets(model, ()).linears)
    assert torch.equal(model.eval()(input_ids=tokens(3)).logits, without.eval()(input_ids=tokens(3)).logits)
    assert not torch.equal(model.train()(input_ids=tokens(3)).logits, without(input_ids=tokens(3)).logits)


def test_layers_with_and_without_adapters_are_counted() -> None:
    counts = {name: numbers for name, *numbers in count_adapted(LoraTask("DeepSeek-V3").build_model())}
    assert counts["self_attn.q_a_proj"] == [3, 3]
    assert counts["mlp.gate_proj"] == [1, 1]
    assert counts["mlp.shared_experts.down_proj"] == [2, 2]
    assert counts["mlp.experts (up)"] == [2, 2]
    assert counts["lm_head"] == [0, 1]
    some = LoraOptions(2, 4.0, ("experts.down_proj", "model.layers.1.self_attn.o_proj"))
    counts = {
        name: numbers for name, *numbers in count_adapted(LoraTask("DeepSeek-V3", options=some).build_model())
    }
    assert counts["self_attn.o_proj"] == [1, 3]
    assert (counts["mlp.experts (up)"], counts["mlp.experts (down)"]) == ([0, 2], [2, 2])
    assert count_adapted(use(build("DeepSeek-V3"))) == ()


def test_only_adapters_are_trained() -> None:
    model = add_lora(use(build("Qwen3-MoE", torch.float32)), OPTIONS)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    model(input_ids=tokens(2)).logits.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


def test_new_adapters_change_nothing() -> None:
    model = use(build("Qwen3-MoE"))
    before = model(input_ids=tokens(3)).logits
    assert torch.equal(add_lora(model, OPTIONS)(input_ids=tokens(3)).logits, before)


def test_weights_stay_in_their_type_and_adapters_are_fp32() -> None:
    model = add_lora(use(build("Qwen3-MoE", torch.bfloat16)), OPTIONS)
    types = {p.requires_grad: p.dtype for p in model.parameters()}
    assert types == {False: torch.bfloat16, True: torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(2)).logits.float().sum()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("held", [(0, 3, 6), (3,)], ids=str)
def test_an_adapter_starts_from_the_same_numbers_on_any_host(held: tuple[int, ...]) -> None:
    whole = add_lora(use(build("Qwen3-MoE")), OPTIONS)
    part = add_lora(use(build("Qwen3-MoE")), OPTIONS)
    place(part, [[0 if expert in held else 1 for expert in range(EXPERTS)]] * 2, 0)
    for model in (whole, part):
        initialise_lora(model, seed=5)
    everything = by_expert(whole, dict(whole.named_parameters()))
    own = by_expert(part, dict(part.named_parameters()))
    assert all(torch.equal(tensor, everything[name]) for name, tensor in own.items())
    first = everything["model.layers.0.mlp.experts.hosted.bank.3.down_lora_a"]
    assert first.std() == pytest.approx(first.shape[0] ** -0.5 / 3**0.5, rel=0.4), "as PEFT draws them"
    assert not torch.equal(first, everything["model.layers.0.mlp.experts.hosted.bank.2.down_lora_a"])
    assert not everything["model.layers.0.mlp.experts.hosted.bank.3.down_lora_b"].any()
    dense = everything["model.layers.1.self_attn.q_proj.lora_A.default.weight"]
    assert 0.7 * dense.shape[1] ** -0.5 < dense.abs().max() <= dense.shape[1] ** -0.5


def test_merged_weights_compute_what_the_adapters_did() -> None:
    model = LoraTask("GPT-OSS").build_model()
    before = model(input_ids=tokens(3)).logits
    names = set(dict(use(build("GPT-OSS")).named_parameters()))
    merge_lora(model)
    assert set(dict(model.named_parameters())) == names
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(input_ids=tokens(3)).logits, before, rtol=1e-6, atol=1e-6)


def test_a_model_with_adapters_is_not_restored() -> None:
    with pytest.raises(ValueError, match="merge_lora before restore"):
        restore(LoraTask("Qwen3-MoE").build_model())


def test_experts_must_be_ours_before_they_get_adapters() -> None:
    with pytest.raises(ValueError, match=r"call experts\.transformers\.use before add_lora"):
        add_lora(build("Qwen3-MoE"), OPTIONS)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (4, 0.0)])
def test_rank_and_alpha_are_positive(rank: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        LoraOptions(rank, alpha)


def test_a_model_shows_no_adapters_while_weights_are_read() -> None:
    model = LoraTask("GPT-OSS").build_model()
    before = model(input_ids=tokens(3)).logits
    names = list(dict(model.named_parameters()))
    plain = use(build("GPT-OSS"))
    with without_adapters(model):
        assert [name for name in dict(model.named_parameters()) if "lora" not in name] == list(
            dict(plain.named_parameters())
        )
        assert stacked_names(model) == stacked_names(plain)
    assert list(dict(model.named_parameters())) == names
    assert torch.equal(model(input_ids=tokens(3)).logits, before)


def test_frozen_matrices_in_bf16_compute_what_autocast_does() -> None:
    results = []
    for shortened in (False, True):
        model = LoraTask("Qwen3-MoE").build_model().float()
        if shortened:
            shorten_frozen(model, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens(3)).logits
        logits.float().square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    short = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert {name.rpartition(".")[2] for name in short} == {"weight", "up_6", "down_6"}
    assert not any("lora" in name or "embed" in name or "norm" in name for name in short)
    assert all(torch.equal(ours, expected) for ours, expected in zip(*results, strict=True))
