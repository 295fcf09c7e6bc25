"""The norm of all gradients."""

from __future__ import annotations

import torch

from orchestrator.train.optim.gradient_norm import norm_of_gradients


def test_the_norm_is_that_of_one_vector_in_fp64() -> None:
    norm = norm_of_gradients([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
    assert (float(norm), norm.dtype) == (5.0, torch.float64)
    assert (float(norm_of_gradients([])), norm_of_gradients([]).dtype) == (0.0, torch.float64)


def test_the_norm_of_gradients_of_two_types_sums_in_fp32_at_least() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in (3000, 7, 5000)]
    mixed = [values[0].bfloat16(), values[1], values[2].bfloat16()]
    exact = torch.cat([gradient.double() for gradient in mixed]).norm()
    torch.testing.assert_close(norm_of_gradients(mixed), exact, rtol=1e-6, atol=0)
