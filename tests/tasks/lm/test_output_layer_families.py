"""The loss at the output layer in chunks: its gradients are those of whole logits, for each family with
experts, in one process, on hosts and on data-parallel workers."""

from __future__ import annotations

import pytest

from harness.hosts.ranks import run_ranks
from harness.lm.families import FAMILIES
from harness.lm.output_losses import Case, assert_equal, train_both, train_both_on_host
from orchestrator.train.group.world import World


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_has_the_gradients_of_whole_logits(name: str) -> None:
    assert_equal(*train_both(Case(name), World.single_process()))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Granite-MoE", "GPT-OSS"])
def test_adapters_and_recomputed_blocks_have_the_gradients_of_whole_logits(name: str) -> None:
    assert_equal(*train_both(Case(name, lora=True), World.single_process()))
    assert_equal(*train_both(Case(name, recompute=True), World.single_process()))


@pytest.mark.extended
@pytest.mark.parametrize(
    "cases",
    [
        [Case(name) for name in FAMILIES],
        [Case(name, sharding="zero3") for name in FAMILIES],
        [
            Case("Qwen3-MoE", sharding="zero2", recompute=True),
            Case("Mixtral", sharding="zero3", lora=True),
            Case("OLMoE", recompute=True),
            Case("OLMoE", data_parallel=True),
            Case("OLMoE", data_parallel=True, sharding="zero3"),
        ],
    ],
    ids=["hosts", "sharded dense part", "other ways"],
)
def test_two_workers_have_the_gradients_of_whole_logits(cases: list[Case]) -> None:
    for of_rank in run_ranks(train_both_on_host, 2, cases, timeout=400.0):
        for found, expected in of_rank:
            assert_equal(found, expected)
