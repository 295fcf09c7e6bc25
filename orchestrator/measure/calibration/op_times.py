"""Device seconds of single operations by size: memory traffic, attention, the optimizer's update, and
products, alone and in groups.

Shape suffixes of products: M rows, K inner size, N columns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.config.sections.optim import OptimSettings
from orchestrator.measure.calibration.timer import DTYPES, MeasuredSizes, Timer
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid, as_floats
from orchestrator.plan.cost.ops import MOVES, MoveKind, ProductLayout
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.named_optimizers import build_adamw
from orchestrator.train.optim.optimizer import ScheduledOptimizer, clip_factor

_LAYOUTS: tuple[ProductLayout, ...] = ("nn", "nt", "tn")
_HEAD_WIDTH = 64


def move_curves(
    timer: Timer, sizes: MeasuredSizes, dtype: torch.dtype = torch.float32
) -> dict[str, PiecewiseCurve]:
    """Measure the seconds of each kind of memory-bound operation by the bytes that it reads and
    writes."""
    keys = list(product(MOVES, sizes.moved))
    passes = [
        {(kind, size): _move_seconds(timer, kind, size, dtype) for kind, size in keys}
        for _ in range(sizes.passes)
    ]
    best = {key: min(one_pass[key] for one_pass in passes) for key in keys}
    return {kind: _rising_curve(sizes.moved, [best[kind, size] for size in sizes.moved]) for kind in MOVES}


def _rising_curve(sizes: Sequence[float], values: Sequence[float]) -> PiecewiseCurve:
    """Return a curve on which larger sizes take at least as long; noise that says otherwise is
    dropped."""
    rising = tuple(max(values[: index + 1]) for index in range(len(values)))
    return PiecewiseCurve(as_floats(sizes), rising)


def _move_seconds(timer: Timer, kind: MoveKind, size_bytes: int, dtype: torch.dtype) -> float:
    device = timer.device
    if kind == "sort":
        # A key of one byte is read; the key and its index are written.
        keys = torch.randint(8, (max(2, size_bytes // 18),), device=device).to(torch.uint8)
        return timer(lambda: keys.sort(stable=True))
    width = _row_width(size_bytes, device)
    arrays = {"plain": 3, "gelu_backward": 3, "norm_backward": 3, "reduce": 1}.get(kind, 2)
    rows = max(1, size_bytes // (arrays * width * dtype.itemsize))
    weight = torch.ones(width, device=device, dtype=dtype)
    order = torch.randperm(rows, device=device)
    mean = torch.zeros(rows, 1, device=device)
    deviation = torch.ones(rows, 1, device=device)
    compute: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "plain": lambda x, y: x + y,
        "heavy": lambda x, _: F.gelu(x),
        "gelu_backward": lambda x, y: torch.ops.aten.gelu_backward(y, x),
        "norm": lambda x, _: F.layer_norm(x, (width,), weight, weight),
        "norm_backward": lambda x, y: torch.ops.aten.native_layer_norm_backward(
            y, x, [width], mean, deviation, weight, weight, [True] * 3
        ),
        "rows": lambda x, _: x.index_select(0, order),
        "reduce": lambda x, _: x.sum(0),
    }

    def make_operands() -> tuple[Tensor, Tensor]:
        return timer.random_tensor((rows, width), dtype), timer.random_tensor((rows, width), dtype)

    return timer.time_with(make_operands, compute[kind])


def _row_width(size_bytes: int, device: torch.device) -> int:
    """Return the width of rows in models that move so much: a GPU's norms of narrow rows are
    several times slower."""
    if device.type == "cuda" and size_bytes >= 2**21:
        return 1024
    return 256 if size_bytes >= 2**16 else 32


def attention_curves(
    timer: Timer, sizes: MeasuredSizes, precisions: Sequence[str]
) -> dict[str, PiecewiseCurve]:
    """Measure the seconds of a head of 64 features by its FLOP, forward and backward, of many
    computed at once."""
    curves: dict[str, PiecewiseCurve] = {}
    for precision in precisions:
        passes = [
            [_attention_seconds(timer, length, DTYPES[precision]) for length in sizes.lengths]
            for _ in range(sizes.passes)
        ]
        by_length = list(zip(*passes, strict=True))
        for index, (direction, products) in enumerate((("forward", 2), ("backward", 5))):
            flops = [products * length**2 * _HEAD_WIDTH for length in sizes.lengths]
            best = [min(seconds[index] for seconds in repeats) for repeats in by_length]
            curves[f"{precision} {direction}"] = _rising_curve(flops, best)
    return curves


def _attention_seconds(timer: Timer, length: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of one head, forward and backward."""
    heads = 16 if timer.device.type == "cpu" else 128
    shape = (heads // 8, 8, length, _HEAD_WIDTH)
    q, k, v = (timer.random_tensor(shape, dtype).detach().requires_grad_() for _ in range(3))
    with torch.no_grad():
        forward = timer(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(output)
    backward = timer(lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True))
    return forward / heads, backward / heads


def update_curve(timer: Timer, sizes: MeasuredSizes) -> PiecewiseCurve:
    """Measure norm, clipping and AdamW by the bytes of the parameters."""
    passes = [
        [timer(make_update(_four_parameters(size, timer.device))) for size in sizes.updated]
        for _ in range(sizes.passes)
    ]
    return _rising_curve(sizes.updated, [min(seconds) for seconds in zip(*passes, strict=True)])


def _four_parameters(size_bytes: int, device: torch.device) -> list[nn.Parameter]:
    elements = max(1, size_bytes // 16)
    return [nn.Parameter(torch.randn(elements, device=device)) for _ in range(4)]


def make_update(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Return a function that updates the parameters as at the end of a step."""
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    settings = OptimSettings()
    optimizer = ScheduledOptimizer(
        build_adamw([{"params": parameters}], settings, True, parameters), lambda _: 1.0
    )

    def update() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        _, factor = clip_factor(norm_of_gradients(gradients), 0.5, 1.0)
        optimizer.scale_gradients(gradients, factor)
        optimizer.step(0, None)

    return update


# --- products


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
