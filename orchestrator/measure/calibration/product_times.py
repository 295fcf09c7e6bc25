"""Device seconds of matrix products by size, alone and in groups.

Shape suffixes: M rows, K inner size, N columns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from orchestrator.measure.calibration.measured_sizes import DTYPES, MeasuredSizes
from orchestrator.measure.calibration.timer import Timer
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid, as_floats
from orchestrator.plan.cost.ops import ProductLayout

_LAYOUTS: tuple[ProductLayout, ...] = ("nn", "nt", "tn")


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Compute fp32 products with tf32, or without it for every other precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def product_grids(timer: Timer, sizes: MeasuredSizes, precision: str) -> dict[str, PiecewiseGrid]:
    """Measure products of all sizes, by layout."""
    with _matmul_precision(precision):
        return {layout: _product_grid(timer, sizes, DTYPES[precision], layout) for layout in _LAYOUTS}


def _product_grid(
    timer: Timer, sizes: MeasuredSizes, dtype: torch.dtype, layout: ProductLayout
) -> PiecewiseGrid:
    shapes = list(product(sizes.m, sizes.k, sizes.n))
    measured: dict[tuple[int, ...], float] = {}
    for m, k, n in shapes * sizes.passes:
        if 2.0 * m * k * n <= sizes.largest_flops:
            seconds = product_seconds(timer, (m, k, n), layout, dtype)
            measured[m, k, n] = min(seconds, measured.get((m, k, n), math.inf))
    return PiecewiseGrid(
        m=as_floats(sizes.m),
        k=as_floats(sizes.k),
        n=as_floats(sizes.n),
        seconds=tuple(_measured_or_extrapolated(measured, sizes, shape) for shape in shapes),
    )


def unaligned_factors(timer: Timer, precision: str) -> dict[str, float]:
    """Return the slowdown of products whose rows begin at odd addresses, by layout.

    A vocabulary of 50,257 has such rows. The odd size is where such a model has it.
    """
    shapes: dict[ProductLayout, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
        "nt": ((4096, 1024, 4096), (4096, 1024, 4097)),
        "nn": ((4096, 4096, 1024), (4096, 4097, 1024)),
        "tn": ((4096, 4096, 1024), (4097, 4096, 1024)),
    }
    factors: dict[str, float] = {}
    with _matmul_precision(precision):
        for layout, (even_shape, odd_shape) in shapes.items():
            even = product_seconds(timer, even_shape, layout, DTYPES[precision])
            odd = product_seconds(timer, odd_shape, layout, DTYPES[precision])
            factors[layout] = max(1.0, odd / even)
    return factors


def product_seconds(
    timer: Timer, shape: tuple[int, int, int], layout: ProductLayout, dtype: torch.dtype
) -> float:
    """Time one product. Layout ``nt`` adds a bias, as linear layers do."""
    m, k, n = shape
    bias_N = torch.zeros(n, device=timer.device, dtype=dtype)

    def make_operands() -> tuple[Tensor, Tensor]:
        if layout == "tn":
            return timer.random_tensor((k, m), dtype).t(), timer.random_tensor((k, n), dtype)
        a_MK = timer.random_tensor((m, k), dtype)
        if layout == "nt":
            return a_MK, timer.random_tensor((n, k), dtype).t()
        return a_MK, timer.random_tensor((k, n), dtype)

    def add_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
        return torch.addmm(bias_N, a_MK, b_KN)

    return timer.time_with(make_operands, add_product if layout == "nt" else torch.mm)


def _measured_or_extrapolated(
    measured: Mapping[tuple[int, ...], float], sizes: MeasuredSizes, shape: tuple[int, ...]
) -> float:
    """Return the measured seconds; for a product that is too large, extrapolate from the next
    smaller ones."""
    if shape in measured:
        return measured[shape]
    guesses = []
    for axis, axis_sizes in enumerate((sizes.m, sizes.k, sizes.n)):
        index = axis_sizes.index(shape[axis])
        if index:
            smaller = (*shape[:axis], axis_sizes[index - 1], *shape[axis + 1 :])
            seconds = _measured_or_extrapolated(measured, sizes, smaller)
            guesses.append(seconds * axis_sizes[index] / axis_sizes[index - 1])
    return statistics.mean(guesses)


def group_seconds(timer: Timer) -> float:
    """Return the overhead of one more product in a group that torch computes one after another.

    It is the difference between groups of 10 and of 2 small products, in the three forms of a
    step.
    """
    few = _small_group_seconds(timer, 2)
    many = _small_group_seconds(timer, 10)
    return max(0.0, many - few) / 8


def _small_group_seconds(timer: Timer, experts: int) -> float:
    """Return the mean seconds of a group in its forward form and its two backward forms."""
    rows, gradients = (torch.randn(8 * experts, 16, device=timer.device) for _ in range(2))
    weights = torch.randn(experts, 16, 16, device=timer.device)
    ends = _group_ends(experts, 8, timer.device)
    forms = [(rows, weights), (gradients, weights.transpose(1, 2)), (rows.t(), gradients)]
    return sum(timer(lambda a=a, b=b: F.grouped_mm(a, b, offs=ends)) for a, b in forms) / len(forms)


def grouped_curve(timer: Timer, dtype: torch.dtype = torch.bfloat16) -> PiecewiseCurve:
    """Measure grouped products of 8 experts as a multiple of one product of all rows, by rows per
    expert."""
    width = 1024
    experts = 8
    rows_per_expert = (32, 128, 512, 2048)
    slowdowns = []
    for rows in rows_per_expert:
        x = torch.randn(rows * experts, width, device=timer.device).to(dtype)
        weights = torch.randn(experts, width, width, device=timer.device).to(dtype)
        ends = _group_ends(experts, rows, timer.device)
        grouped = timer(lambda x=x, weights=weights, ends=ends: F.grouped_mm(x, weights, offs=ends))
        one_product = timer(lambda x=x, weights=weights: x @ weights[0])
        slowdowns.append(grouped / one_product)
    return PiecewiseCurve(as_floats(rows_per_expert), tuple(slowdowns))


def _group_ends(experts: int, rows_per_expert: int, device: torch.device) -> Tensor:
    """Return the row after the last of each expert, as ``grouped_mm`` takes them."""
    return torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows_per_expert
