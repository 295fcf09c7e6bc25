"""What a device can do, measured operation by operation: products by size, bytes moved, attention, the optimizer's update."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.measure.timer import Timer
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.ops import MOVES, MoveKind, ProductLayout
from orchestrator.train.parts.optim import scale_and_clip, norm_of_gradients

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAYOUTS: tuple[ProductLayout, ...] = ("nn", "nt", "tn")


@dataclass(frozen=True)
class MeasuredSizes:
    """What is measured: sizes of products, bytes of other operations, tokens of attention."""

    m: tuple[int, ...]
    k: tuple[int, ...]
    n: tuple[int, ...]
    largest_flops: float
    """Of one product; what is larger is reckoned from it."""
    moved: tuple[int, ...]
    lengths: tuple[int, ...]
    updated: tuple[int, ...]
    seconds: float
    """For one figure, each time."""
    passes: int
    """All of it is done so often, and of each figure the best taken: what disturbs one pass is over by the next."""


ON_CPU = MeasuredSizes(
    m=(8, 16, 32, 128, 512, 2048),
    k=(16, 64, 256, 1024),
    n=(16, 64, 256, 1024),
    largest_flops=6e8,
    moved=(2**12, 2**15, 2**18, 2**20, 2**22, 2**24),
    lengths=(16, 64, 128, 256),
    updated=(2**12, 2**18, 2**21, 2**24),
    seconds=0.004,
    passes=2,
)
ON_GPU = MeasuredSizes(
    m=(64, 256, 1024, 4096, 16384),
    k=(64, 256, 1024, 4096, 16384),
    n=(64, 256, 1024, 4096),
    largest_flops=6e11,
    moved=(2**12, 2**18, 2**21, 2**23, 2**25, 2**27, 2**29),
    lengths=(64, 256, 1024, 2048),
    updated=(2**16, 2**22, 2**26, 2**29),
    seconds=0.002,
    passes=1,
)
TINY = MeasuredSizes((8, 32), (16, 64), (16, 64), 1e8, (2**12, 2**16), (16, 32), (2**12, 2**14), 0.0005, 1)


def product_grids(timer: Timer, sizes: MeasuredSizes, precision: str) -> dict[str, PiecewiseGrid]:
    """Products of all sizes, with either factor transposed or none."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return {layout: _grid(timer, sizes, _DTYPES[precision], layout) for layout in _LAYOUTS}
    finally:
        torch.set_float32_matmul_precision(before)


def _grid(timer: Timer, sizes: MeasuredSizes, dtype: torch.dtype, layout: ProductLayout) -> PiecewiseGrid:
    found: dict[tuple[int, ...], float] = {}
    for m, k, n in list(product(sizes.m, sizes.k, sizes.n)) * sizes.passes:
        if 2.0 * m * k * n <= sizes.largest_flops:
            seconds = product_seconds(timer, (m, k, n), layout, dtype)
            found[m, k, n] = min(seconds, found.get((m, k, n), math.inf))
    axes = tuple(tuple(map(float, axis)) for axis in (sizes.m, sizes.k, sizes.n))
    return PiecewiseGrid(
        *axes, tuple(_reckoned(found, sizes, point) for point in product(sizes.m, sizes.k, sizes.n))
    )  # pyright: ignore


def unaligned_factors(timer: Timer, precision: str) -> dict[str, float]:
    """How many times as long a product takes whose rows begin at odd places, as those of a vocabulary of 50,257 do: by layout, with
    the odd size where such a model has it."""
    sizes: dict[ProductLayout, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
        "nt": ((4096, 1024, 4096), (4096, 1024, 4097)),
        "nn": ((4096, 4096, 1024), (4096, 4097, 1024)),
        "tn": ((4096, 4096, 1024), (4097, 4096, 1024)),
    }
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    found: dict[str, float] = {}
    for layout, shapes in sizes.items():
        even, odd = (product_seconds(timer, shape, layout, _DTYPES[precision]) for shape in shapes)
        found[layout] = max(1.0, odd / even)
    torch.set_float32_matmul_precision(before)
    return found


def product_seconds(
    timer: Timer, shape: tuple[int, int, int], layout: ProductLayout, dtype: torch.dtype
) -> float:
    """One product; with the second factor transposed, as linear layers have it, a bias is added."""
    m, k, n = shape

    def make() -> tuple[Tensor, Tensor]:
        a = timer.take((k, m) if layout == "tn" else (m, k), dtype)
        b = timer.take((n, k) if layout == "nt" else (k, n), dtype)
        return a.t() if layout == "tn" else a, b.t() if layout == "nt" else b

    bias = torch.zeros(n, device=timer.device, dtype=dtype)
    return timer.in_turn(make, (lambda a, b: torch.addmm(bias, a, b)) if layout == "nt" else torch.mm)


def _reckoned(found: Mapping[tuple[int, ...], float], sizes: MeasuredSizes, point: tuple[int, ...]) -> float:
    """What was measured, or for a product that was too large, in proportion to the next smaller ones."""
    if point in found:
        return found[point]
    guesses = []
    for place, axis in enumerate((sizes.m, sizes.k, sizes.n)):
        index = axis.index(point[place])
        if index:
            smaller = (*point[:place], axis[index - 1], *point[place + 1 :])
            guesses.append(_reckoned(found, sizes, smaller) * axis[index] / axis[index - 1])
    return statistics.mean(guesses)


def move_curves(
    timer: Timer, sizes: MeasuredSizes, dtype: torch.dtype = torch.float32
) -> dict[str, PiecewiseCurve]:
    """Seconds by bytes read and written, for each kind of operation that is no product."""
    passes = [
        {(k, s): _move(timer, k, s, dtype) for k in MOVES for s in sizes.moved} for _ in range(sizes.passes)
    ]
    return {
        kind: _curve(sizes.moved, [min(one[kind, size] for one in passes) for size in sizes.moved])
        for kind in MOVES
    }


def _curve(sizes: Sequence[float], values: Sequence[float]) -> PiecewiseCurve:
    """Larger ones take at least as long: what noise says against it is left out."""
    return PiecewiseCurve(
        tuple(map(float, sizes)), tuple(max(values[: place + 1]) for place in range(len(values)))
    )


def _move(timer: Timer, kind: MoveKind, size: int, dtype: torch.dtype) -> float:
    if kind == "sort":
        keys = torch.randint(8, (max(2, size // 18),), device=timer.device).to(
            torch.uint8
        )  # in: a byte each; out: it and a place
        return timer(lambda: keys.sort(stable=True))
    width = _width(size, timer.device)
    arrays = {"plain": 3, "gelu_backward": 3, "norm_backward": 3, "reduce": 1}.get(kind, 2)
    shape = max(1, size // (arrays * width * dtype.itemsize)), width
    weight, order = (
        torch.ones(width, device=timer.device, dtype=dtype),
        torch.randperm(shape[0], device=timer.device),
    )
    mean, deviation = (
        torch.zeros(shape[0], 1, device=timer.device),
        torch.ones(shape[0], 1, device=timer.device),
    )
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
    return timer.in_turn(lambda: (timer.take(shape, dtype), timer.take(shape, dtype)), compute[kind])


def _width(size: int, device: torch.device) -> int:
    """Of rows: as wide as those of models that move so much. A GPU's norms of narrow ones are several times slower."""
    if device.type == "cuda" and size >= 2**21:
        return 1024
    return 256 if size >= 2**16 else 32


def attention_curves(
    timer: Timer, sizes: MeasuredSizes, precisions: Sequence[str]
) -> dict[str, PiecewiseCurve]:
    """Seconds of a head of 64 features by its FLOP, forward and backward, where many are computed at once."""
    curves: dict[str, PiecewiseCurve] = {}
    for precision in precisions:
        passes = [
            [_attention(timer, length, _DTYPES[precision]) for length in sizes.lengths]
            for _ in range(sizes.passes)
        ]
        found = [[min(values) for values in zip(*pairs, strict=True)] for pairs in zip(*passes, strict=True)]
        for place, (direction, products) in enumerate((("forward", 2), ("backward", 5))):
            flops = [products * length**2 * 64 for length in sizes.lengths]
            curves[f"{precision} {direction}"] = _curve(flops, [pair[place] for pair in found])
    return curves


def _attention(timer: Timer, length: int, dtype: torch.dtype) -> tuple[float, float]:
    heads = 16 if timer.device.type == "cpu" else 128
    q, k, v = (timer.take((heads // 8, 8, length, 64), dtype).detach().requires_grad_() for _ in range(3))
    with torch.no_grad():
        forward = timer(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(made)
    backward = timer(lambda: torch.autograd.grad(made, (q, k, v), gradient, retain_graph=True))
    return forward / heads, backward / heads


def update_curve(timer: Timer, sizes: MeasuredSizes) -> PiecewiseCurve:
    """Norm, clipping and AdamW over parameters of so many bytes."""
    passes = [
        [timer(updating(_four(size, timer.device))) for size in sizes.updated] for _ in range(sizes.passes)
    ]
    return _curve(sizes.updated, [min(values) for values in zip(*passes, strict=True)])


def _four(size: int, device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(max(1, size // 16), device=device)) for _ in range(4)]


def updating(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """An update of these, as a step ends with it."""
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def update() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        scale_and_clip(gradients, norm_of_gradients(gradients), 0.5, 1.0)
        optimizer.step()

    return update


def group_seconds(timer: Timer) -> float:
    """What each further product of a group takes beyond its arithmetic, where torch computes them one after another: half of
    that between groups of 2 and of 10 small ones, in the three forms that a step has."""
    found = []
    for experts in (2, 10):
        x, g = (torch.randn(8 * experts, 16, device=timer.device) for _ in range(2))
        weights = torch.randn(experts, 16, 16, device=timer.device)
        ends = torch.arange(1, experts + 1, device=timer.device, dtype=torch.int32) * 8
        forms = [(x, weights), (g, weights.transpose(1, 2)), (x.t(), g)]
        found.append(
            sum(timer(lambda a=a, b=b, ends=ends: F.grouped_mm(a, b, offs=ends)) for a, b in forms)
            / len(forms)
        )
    return max(0.0, found[1] - found[0]) / 8


def grouped_curve(timer: Timer, dtype: torch.dtype = torch.bfloat16) -> PiecewiseCurve:
    """Grouped products of 8 experts against one product of all their rows: how many times as long, by rows per expert."""
    width, experts, values = 1024, 8, []
    for rows in (32, 128, 512, 2048):
        x = torch.randn(rows * experts, width, device=timer.device).to(dtype)
        weights = torch.randn(experts, width, width, device=timer.device).to(dtype)
        ends = torch.arange(1, experts + 1, device=timer.device, dtype=torch.int32) * rows
        together = timer(lambda x=x, weights=weights, ends=ends: F.grouped_mm(x, weights, offs=ends))
        values.append(together / timer(lambda x=x, weights=weights: x @ weights[0]))
    return PiecewiseCurve((32.0, 128.0, 512.0, 2048.0), tuple(values))
