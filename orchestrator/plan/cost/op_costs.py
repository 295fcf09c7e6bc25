"""Device seconds of single operations. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.plan.cost.machine import DeviceCosts
from orchestrator.plan.cost.ops import AttentionOp, MoveOp, ProductOp

_ALIGNMENT = 8  # elements; rows of other lengths begin at addresses that tensor cores read slowly


def product_seconds(product: ProductOp, device: DeviceCosts, tf32: bool = False) -> float:
    """Return the seconds of a product beyond the overhead of any operation.

    The products of a group run together in one kernel, or one after another.
    """
    precision = "tf32" if tf32 and product.precision == "fp32" else product.precision
    grids = device.products.get(precision) or device.products["fp32"]
    grid = grids[product.layout] if product.layout in grids else next(iter(grids.values()))
    m = product.m
    k = product.k
    n = product.n
    if product.batch == 1:
        slowdown = _unaligned_slowdown(product, device.unaligned.get(precision, {}))
        return max(0.0, grid.at(m, k, n) * slowdown - device.floor)
    if device.grouped is None or not product.of_experts:
        # The smallest product of the grid is nearly all overhead, which ``group_s`` already
        # counts.
        smallest = grid.seconds[0]
        return product.batch * (device.group_s + max(0.0, grid.at(m, k, n) - smallest))
    # In layout tn (the gradient of the weights) the rows of each expert are the inner size.
    if product.layout == "tn":
        rows = k
        one_product = grid.at(m, k * product.batch, n)
    else:
        rows = m
        one_product = grid.at(m * product.batch, k, n)
    slowdown = device.grouped.at(min(rows, device.grouped.sizes[-1]))
    return max(0.0, one_product * slowdown - device.floor)


def _unaligned_slowdown(product: ProductOp, unaligned: Mapping[str, float]) -> float:
    """Return the slowdown of a product with unaligned rows: only sizes along rows of memory
    count."""
    row_sizes = (product.m, product.n) if product.layout == "tn" else (product.k, product.n)
    if any(size % _ALIGNMENT for size in row_sizes):
        return unaligned.get(product.layout, 1.0)
    return 1.0


def attention_seconds(attention: AttentionOp, device: DeviceCosts) -> float:
    direction = "backward" if attention.backward else "forward"
    curve = (
        device.attention.get(f"{attention.precision} {direction}") or device.attention[f"fp32 {direction}"]
    )
    return attention.heads * curve.at(attention.flops / attention.heads / attention.times)


def move_seconds(move: MoveOp, device: DeviceCosts) -> float:
    return max(0.0, device.moves[move.kind].at(move.bytes) - device.floor)
