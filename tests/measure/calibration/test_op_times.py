"""Measured products on a small grid."""

from __future__ import annotations

from dataclasses import replace

import torch

from orchestrator.measure.calibration.op_times import product_grids
from orchestrator.measure.calibration.timer import TINY, Timer


def test_larger_products_take_longer() -> None:
    sizes = replace(TINY, m=(8, 512), k=(16, 512), n=(16, 512))
    for grid in product_grids(Timer(torch.device("cpu"), 0.001), sizes, "fp32").values():
        assert grid.at(512, 512, 512) > grid.at(8, 16, 16)


def test_products_too_large_to_measure_are_extrapolated() -> None:
    sizes = replace(TINY, m=(8, 1024), k=(16, 1024), n=(16, 1024), largest_flops=1e8)
    grid = product_grids(Timer(torch.device("cpu"), 0.001), sizes, "fp32")["nn"]
    assert grid.at(1024, 1024, 1024) > 8 * grid.at(1024, 1024, 16)
