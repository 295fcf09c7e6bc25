"""Device seconds of single operations by size: products, memory traffic, attention, the
optimizer's update.

Shape suffixes of products: M rows, K inner size, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.config.sections.optim import OptimSettings
from orchestrator.measure.calibration.measured_sizes import DTYPES, MeasuredSizes
from orchestrator.measure.calibration.timer import Timer
from orchestrator.plan.cost.interpolate import PiecewiseCurve, as_floats
from orchestrator.plan.cost.ops import MOVES, MoveKind
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.named_optimizers import build_adamw
from orchestrator.train.optim.optimizer import ScheduledOptimizer, clip_factor

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
