"""The layer by hand that expert hosts are compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.parallel import spmd_layer
from benchmarks.parallel.spmd_layer import SpmdLayer, data
from experts.moe.layer import MoELayer


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd_layer, "TOKENS", 24)
    monkeypatch.setattr(spmd_layer, "WIDTH", 16)
    monkeypatch.setattr(spmd_layer, "HIDDEN", 8)


def test_it_computes_our_layer() -> None:
    by_hand = SpmdLayer(rank=0, world_size=1)
    ours = MoELayer(spmd_layer.WIDTH, [spmd_layer.HIDDEN] * spmd_layer.EXPERTS, spmd_layer.TOP_K)
    weights = (ours.gate.weight_ED, *(stack for _, _, stack in ours.bank.stacks()))
    with torch.no_grad():
        for weight, leaf in zip(weights, by_hand.parameters(), strict=True):
            weight.copy_(leaf)
    x_TD, _ = data(rank=0)
    torch.testing.assert_close(by_hand(x_TD), ours(x_TD)[0])


def test_one_rank_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    join = dist.init_process_group
    address = f"file://{tmp_path / 'store'}"  # torchrun would give an address and a port
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend: join(backend, init_method=address, rank=0, world_size=1)
    )
    monkeypatch.setattr(sys, "argv", ["spmd_layer", "--steps", "2"])
    spmd_layer.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["ranks"] == 1
    assert figures["median_step_s"] > 0
    assert 0 < figures["loss"] < 10
