"""Routing biases that balance the experts of ``transformers`` models, against a slow oracle in one
process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from experts.balance import moe_layers
from experts.moe.context import StepContext
from experts.transformers.balance import has_router_biases, use_balance_bias
from experts.transformers.registration import use
from harness.hosts.ranks import run_ranks
from harness.lm.families import BIASED_FAMILIES, FAMILIES, build, tokens
from harness.moe.bias_runs import (
    BiasRun,
    biases_of,
    train_oracle,
    train_with_bias,
    train_with_bias_on_hosts,
)
from orchestrator.train.group.world import World


@cache
def oracle(name: str) -> BiasRun:
    return train_oracle(name)


@cache
def on_hosts(name: str) -> list[dict[tuple[str, int], BiasRun]]:
    return run_ranks(train_with_bias_on_hosts, 3, [name])


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("name", BIASED_FAMILIES)
def test_biases_move_as_in_one_process(name: str, hosts: int) -> None:
    if hosts == 1:
        runs = [train_with_bias(name, World.single_process())]
    else:
        runs = [rank[name, hosts] for rank in on_hosts(name)[:hosts]]
    expected = oracle(name)
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=1e-12)
        for found, biases in zip(run.biases, expected.biases, strict=True):
            torch.testing.assert_close(found, biases, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", BIASED_FAMILIES)
def test_the_bias_changes_the_choices_within_a_test(name: str) -> None:
    """Without that, the test above would not see a bias that is stored and not used."""
    first, *_, last = oracle(name).biases
    start = biases_of(build(name))
    moves = {key: (last[key] - start[key]) / (first[key] - start[key]) for key in start}
    assert any(float(move.min()) < len(oracle(name).biases) - 0.5 for move in moves.values())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BIASED_FAMILIES])
def test_a_family_without_a_bias_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"has no routing bias .*experts\)\. Families such as DeepSeek-V3"):
        use_balance_bias(use(build(name)), 0.001)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_with_a_bias_are_known(name: str) -> None:
    assert has_router_biases(use(build(name))) == (name in BIASED_FAMILIES)


def test_padding_does_not_count() -> None:
    model = use(build("DeepSeek-V3"))
    ids_BT = tokens(2)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, 2:] = 0
    layer = moe_layers(model)[0][1]
    with layer.context.use_step(StepContext(counted_T=mask_BT)):
        model(input_ids=ids_BT)
    counted = [layer.counts_E.clone() for layer in model.modules() if hasattr(layer, "counts_E")]
    # The tokens of documents by themselves: what follows them changes none of their choices.
    expected = [torch.zeros_like(counts_E) for counts_E in counted]
    for sample_T, length in zip(ids_BT, (6, 2), strict=True):
        model(input_ids=sample_T[None, :length])
        parts = [layer.counts_E for layer in model.modules() if hasattr(layer, "counts_E")]
        expected = [total + part for total, part in zip(expected, parts, strict=True)]
    torch.testing.assert_close(counted, expected)
