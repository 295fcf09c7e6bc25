"""The blocked SwiGLU of a CPU against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import cpu


def plain(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    gate_RH, value_RH = hidden_RH.chunk(2, dim=-1)
    return F.silu(gate_RH) * value_RH * weights_R.unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 11])
def test_output_and_gradients_are_those_of_plain_torch_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int
) -> None:
    hidden = 6
    monkeypatch.setattr(
        cpu, "_BLOCK_BYTES", 4 * 2 * hidden * dtype.itemsize
    )  # four rows, the last block short
    draw = torch.Generator().manual_seed(num_rows)
    hidden_RH = torch.randn(num_rows, 2 * hidden, generator=draw).to(dtype).requires_grad_()
    weights_R = torch.rand(num_rows, generator=draw).to(dtype).requires_grad_()
    upstream_RH = torch.randn(num_rows, hidden, generator=draw).to(dtype)
    results: list[tuple[Tensor, ...]] = []
    for compute in (plain, cpu.weighted_swiglu):
        output_RH = compute(hidden_RH, weights_R)
        grads = torch.autograd.grad(output_RH, (hidden_RH, weights_R), upstream_RH)
        results.append((output_RH, *grads))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_row_wider_than_a_block_is_a_block() -> None:
    hidden_RH = torch.randn(3, cpu._BLOCK_BYTES)
    weights_R = torch.rand(3)
    assert torch.equal(cpu.weighted_swiglu(hidden_RH, weights_R), plain(hidden_RH, weights_R))


def test_blocks_have_as_many_rows_as_fit() -> None:
    """In one row at a time the overhead of calls would exceed the work."""
    assert cpu._rows_per_block(torch.empty(3, 256)) == cpu._BLOCK_BYTES // 1024
    assert cpu._rows_per_block(torch.empty(3, 256, dtype=torch.float64)) == cpu._BLOCK_BYTES // 2048


def test_only_the_inputs_are_kept() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hidden_RH = torch.randn(5, 8, requires_grad=True)
    weights_R = torch.rand(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cpu.weighted_swiglu(hidden_RH, weights_R)
    assert [tensor.data_ptr() for tensor in kept] == [hidden_RH.data_ptr(), weights_R.data_ptr()]
