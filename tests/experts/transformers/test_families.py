"""Families of ``transformers`` with our experts, in one process and on two and three real hosts over
gloo, against their own eager code in one process.

All in fp64, also where these models ask for fp32: see ``Fp32MeansFp64``."""

from __future__ import annotations

from functools import cache

import pytest

from harness.hosts.ranks import run_ranks
from harness.lm.families import FAMILIES, build
from harness.lm.family_runs import (
    FamilyRun,
    differences,
    num_moe_layers,
    train_eager,
    train_in_one_process,
    train_on_hosts,
    train_with_moves,
    worst_weight,
)

HOST_COUNTS = (1, 2, 3)


@cache
def eager(name: str) -> FamilyRun:
    return train_eager(name)


@cache
def on_hosts(name: str) -> list[dict[tuple[str, int], FamilyRun]]:
    """A family on two and on three hosts, in one start of processes."""
    return run_ranks(train_on_hosts, 3, [name], [2, 3])


def runs(name: str, hosts: int) -> list[FamilyRun]:
    if hosts == 1:
        return [train_in_one_process(name)]
    return [ranks[name, hosts] for ranks in on_hosts(name)[:hosts]]


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("hosts", HOST_COUNTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_its_eager_code(name: str, hosts: int) -> None:
    found = differences(name, runs(name, hosts), eager(name))
    bounds = {"loss": 1e-12, "norm": 1e-12, "auxiliary loss": 1e-12, "5 AdamW steps": 1e-9}
    bounds["5 AdamW steps with it"] = 1e-9
    too_large = {kind: off for kind, off in found.items() if not off <= bounds.get(kind, 1e-10)}
    assert not too_large


def test_experts_with_biases_move_between_hosts() -> None:
    hosts = run_ranks(train_with_moves, 2, "GPT-OSS")
    assert hosts[0].losses == pytest.approx(eager("GPT-OSS").losses, rel=1e-12)
    assert worst_weight(hosts, eager("GPT-OSS"), build("GPT-OSS")) <= 1e-9
    moved = "model.layers.0.mlp.experts.hosted.bank.0.down_bias"
    assert [moved in host.weights for host in hosts] == [False, True]


def test_each_family_has_two_layers_with_experts() -> None:
    """The placements are made for them."""
    assert {name: num_moe_layers(name) for name in FAMILIES} == dict.fromkeys(FAMILIES, 2)
