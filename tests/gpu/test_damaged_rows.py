"""Rows of any content from other hosts, on a GPU: nothing is read out of bounds, nothing asserts on
the device, and the CUDA context stays usable."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from experts.tokens.received_rows import InvalidRows
from tests.support.damaged_rows import DamagingExchange, compute_layer, make_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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


def assert_context_works() -> None:
    torch.cuda.synchronize()
    assert float(torch.ones(1000, device="cuda:0").sum()) == 1000.0
