"""Rows of any content from other hosts, on a GPU: nothing is read out of bounds, nothing asserts on
the device, and the CUDA context stays usable."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from experts.kernels.grouped import experts_grouped
from experts.tokens.received_rows import InvalidRows
from harness.moe.damaged_rows import DamagingExchange, compute_layer, make_layer

pytestmark = pytest.mark.gpu
SIZES = [8, 8, 16, 8, 16, 8, 8]


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exchange", [*(DamagingExchange(3, seed) for seed in range(4))], ids=str)
def test_the_context_survives_rows_of_random_bits(
    exchange: DamagingExchange, low_precision: bool, kernel: Literal["loop", "grouped"]
) -> None:
    layer = make_layer(exchange, SIZES, kernel, "cuda:0")
    with torch.autocast("cuda", torch.bfloat16, enabled=low_precision):
        compute_layer(layer, 300)
    assert_context_works()
    with pytest.raises(InvalidRows, match="layer moe: row"):
        layer.context.finish_row_checks()


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("sizes", [SIZES, [8] * 4], ids=str)
@pytest.mark.parametrize("fill", [0, 255])
def test_the_context_survives_more_and_fewer_choices_than_announced(
    fill: int, sizes: list[int], kernel: Literal["loop", "grouped"]
) -> None:
    layer = make_layer(DamagingExchange(3, fill=fill), sizes, kernel, "cuda:0")
    compute_layer(layer, 300)
    assert_context_works()
    with pytest.raises(InvalidRows, match="layer moe"):
        layer.context.finish_row_checks()


@pytest.mark.parametrize("counts", [[3, 2], [3, 4], [-1, 7], [2**31, 9], [0, 0]])
def test_the_context_survives_counts_that_do_not_cover_the_rows(counts: list[int]) -> None:
    """They are bounded: every row is computed by some expert, and none beyond the rows is read."""
    rows_RD = torch.randn(6, 16, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
    up_EDH = torch.randn(2, 16, 16, device="cuda:0", dtype=torch.bfloat16)
    down_EHD = torch.randn(2, 8, 16, device="cuda:0", dtype=torch.bfloat16)
    counts_E = torch.tensor(counts, device="cuda:0")
    weights_R = torch.ones(6, device="cuda:0", dtype=torch.bfloat16)
    output_RD = experts_grouped(rows_RD, up_EDH, down_EHD, counts_E, weights_R, "swiglu")
    (grad_RD,) = torch.autograd.grad(output_RD, rows_RD, torch.ones_like(output_RD))
    assert_context_works()
    assert bool(output_RD.isfinite().all() & grad_RD.isfinite().all())


def assert_context_works() -> None:
    torch.cuda.synchronize()
    assert float(torch.ones(1000, device="cuda:0").sum()) == 1000.0
