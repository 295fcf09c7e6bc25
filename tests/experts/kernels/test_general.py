"""Experts with biases and activations of their own: both products against a loop over the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.kernels.general import experts_general

COUNTS = ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0])
WIDTH = 8
HIDDEN = 12


def clamped(hidden: Tensor) -> Tensor:
    gate, value = hidden[..., ::2], hidden[..., 1::2]
    return (value.clamp(-0.5, 0.5) + 1) * gate.clamp(max=0.5).sigmoid()


def weighted(hidden: Tensor, weights_R: Tensor) -> Tensor:
    return clamped(hidden) * weights_R.unsqueeze(1)


def make_weights(dtype: torch.dtype, bias: bool) -> dict[str, Tensor]:
    shapes = {"up": (4, WIDTH, 2 * HIDDEN), "down": (4, HIDDEN, WIDTH)}
    if bias:
        shapes |= {"up_bias": (4, 2 * HIDDEN), "down_bias": (4, WIDTH)}
    generator = torch.Generator().manual_seed(1)
    return {
        role: torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for role, shape in shapes.items()
    }


def oracle(rows_RD: Tensor, weights: dict[str, Tensor], counts: list[int], weights_R: Tensor) -> Tensor:
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    outputs = [rows_RD[:0]]
    for row, (expert, x_D) in enumerate(zip(experts, rows_RD, strict=True)):
        hidden = x_D @ weights["up"][expert]
        if "up_bias" in weights:
            hidden = hidden + weights["up_bias"][expert]
        output = clamped(hidden) @ weights["down"][expert]
        if "down_bias" in weights:
            output = output + weights["down_bias"][expert]
        outputs.append(output.unsqueeze(0) * weights_R[row])
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "loop"])
def test_outputs_and_gradients_equal_those_row_by_row(counts: list[int], bias: bool, grouped: bool) -> None:
    dtype = torch.float32 if grouped else torch.float64
    weights = make_weights(dtype, bias)
    generator = torch.Generator().manual_seed(2)
    rows_RD = torch.randn(sum(counts), WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weights_R = torch.rand(sum(counts), dtype=dtype, generator=generator).requires_grad_()
    inputs = [rows_RD, weights_R, *weights.values()]
    counts_E = torch.tensor(counts)
    y_RD = experts_general(rows_RD, weights, counts_E, weights_R, weighted, grouped)
    expected_RD = oracle(rows_RD, weights, counts, weights_R)
    tolerance = 1e-5 if grouped else 1e-12
    torch.testing.assert_close(y_RD, expected_RD, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(y_RD.square().sum(), inputs)
    expected = torch.autograd.grad(expected_RD.square().sum(), inputs, allow_unused=True)
    for ours, theirs in zip(gradients, expected, strict=True):
        # The oracle knows no experts where there are no rows; ours have a gradient of zero.
        wanted = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, wanted, rtol=10 * tolerance, atol=10 * tolerance)
