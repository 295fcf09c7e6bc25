"""The layers that ``moe_layer`` and ``skewed_load`` compare on a GPU, with tiny shapes on a CPU: all of them
compute the layer of the slow oracle."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.moe import moe_layer, skewed_load
from benchmarks.moe.moe_layer import COLUMNS, Candidate, Shape, Weights
from experts.moe.layer import MoELayer
from harness.moe.oracle import moe_oracle
from harness.runs.benchmark_runs import Table, wrong_figures

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16

CPU = torch.device("cpu")
SHAPE = Shape(experts=5, width=16, hidden=24, tokens=13, top_k=2)
SPEEDS = ("plain", "compiled", "transformers", "dense", "dense, compiled", "ours")


def milliseconds(candidate: Candidate, x_TD: Tensor, grad_TD: Tensor) -> float:
    """Time a step by the host's clock: a CPU has no events."""
    began_s = perf_counter()
    candidate.run(x_TD, grad_TD)
    return 1e3 * (perf_counter() - began_s)


def eager(function: Any, **_: Any) -> Any:
    """Take the place of ``torch.compile``, which needs many seconds."""
    return function


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Candidate, "milliseconds", milliseconds)
    monkeypatch.setattr(torch, "compile", eager)


def fp32(weights: Weights) -> Weights:
    """Return the same weights in fp32, as leaves."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in weights.leaves]
    return Weights(leaves[0], leaves[1], leaves[2], weights.share_E)


@pytest.mark.parametrize("skew", [0.0, 4.0])
def test_the_layer_by_hand_computes_the_oracle(skew: float) -> None:
    """Output, losses and all gradients, in fp32; with the larger skew an expert has no token."""
    weights = fp32(Weights.random(SHAPE, CPU, skew))
    layer = MoELayer(SHAPE.width, [SHAPE.hidden] * SHAPE.experts, SHAPE.top_k)
    layer_leaves = (layer.gate.weight_ED, *(stack for _, _, stack in layer.bank.stacks()))
    with torch.no_grad():
        for own, leaf in zip(layer_leaves, weights.leaves, strict=True):
            own.copy_(leaf)

    def oracle(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        output_TD, balance, z, _ = moe_oracle(layer, x_TD)
        return output_TD, balance + z

    x_TD, grad_TD = (tensor.detach().float() for tensor in moe_layer.tokens_of(SHAPE, CPU))
    x_TD.requires_grad_()
    expected = Candidate(oracle, layer_leaves).results(x_TD, grad_TD)
    by_hand = Candidate(partial(moe_layer.plain, weights, SHAPE.top_k), weights.leaves)
    ours = Candidate(partial(moe_layer.ours, layer), layer_leaves)
    for candidate in (by_hand, ours):
        found = [result.clone() for result in candidate.results(x_TD, grad_TD)]
        assert len(found) == len(expected) == 5
        assert moe_layer.difference(found, expected) < 1e-5


def test_the_block_of_transformers_computes_the_same_output() -> None:
    """It has no losses of the gate, so only the output is compared."""
    plain = moe_layer.candidates(SHAPE, CPU, skew=1.0)["plain"]
    peer = moe_layer.transformers_candidate(SHAPE, CPU, plain)
    assert peer is not None
    x_TD, grad_TD = moe_layer.tokens_of(SHAPE, CPU)
    expected_TD = plain.run(x_TD, grad_TD).detach()
    found_TD = peer.run(x_TD, grad_TD).detach()
    assert moe_layer.difference([found_TD], [expected_TD]) < moe_layer.LARGEST_ERROR


def test_a_row_has_a_figure_for_each_column() -> None:
    row = moe_layer.compare(SHAPE, CPU, rounds=1, skew=1.0, fp8=False)
    table = Table(list(COLUMNS), [row])
    assert len(row) == len(COLUMNS)
    # TFLOP/s and megabytes of so small a layer round to zero.
    tiny = (*SPEEDS, "max/mean, empty", "kept MB, plain", "kept MB, ours")
    assert wrong_figures(table, tiny) == []


def test_skewed_loads_have_a_row_each() -> None:
    rows = skewed_load.compare(SHAPE, CPU, rounds=1)
    table = Table(list(skewed_load.COLUMNS), rows)
    assert table.cells("factor") == ["0", "1", "4"]
    assert wrong_figures(table, ("factor", "max/mean, empty")) == []
    empty = [int(cell.split(", ")[1]) for cell in table.cells("max/mean, empty")]
    assert empty[-1] > 0, "the steepest scores leave experts without tokens"
