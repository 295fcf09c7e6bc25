"""Invented devices and clusters whose step times can be computed by hand."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.machine import DeviceCosts, Interconnect, Link, Machine
from orchestrator.plan.cost.ops import MOVES, MicroBatchOps, MoveOp, ProductOp

FLOPS_PER_S = 1e9
BANDWIDTH = 1e8
FLOOR_S = 1e-5
SIZES = (1.0, 1e6)

OPS = MicroBatchOps(
    samples=4,
    products=(ProductOp(100, 200, 50),),
    moves=(MoveOp("plain", 10**6, times=3),),
    parameters=1000,
)


def device(**changes: Any) -> DeviceCosts:
    """Return a device of 1 GFLOP/s and 100 MB/s without other costs.

    If the host waits for operations, 10 µs of a move are overhead.
    """
    corners = [(m, k, n) for m in SIZES for k in SIZES for n in SIZES]
    product_s = tuple(2 * m * k * n / FLOPS_PER_S for m, k, n in corners)
    move = PiecewiseCurve((1e3, 1e9), (1e3 / BANDWIDTH, 1e9 / BANDWIDTH))
    attention = PiecewiseCurve((1.0, 1e12), (1.0 / FLOPS_PER_S, 1e12 / FLOPS_PER_S))
    costs: dict[str, Any] = {
        "name": "a device",
        "memory_bytes": 1e9,
        "asynchronous": True,
        "products": {"fp32": {"nn": PiecewiseGrid(SIZES, SIZES, SIZES, product_s)}},
        "moves": dict.fromkeys(MOVES, move),
        "attention": {"fp32 forward": attention, "fp32 backward": attention},
        "optimizer": PiecewiseCurve((1.0, 1e12), (0.0, 0.0)),
        "grouped": PiecewiseCurve((1.0,), (1.0,)),
    }
    return DeviceCosts(**(costs | changes))


def machine(
    nodes: int = 1,
    per_node: int = 1,
    latency_s: float = 0.0,
    bytes_per_s: float = math.inf,
    **changes: Any,
) -> Machine:
    """Return a cluster with the same link everywhere."""
    link = Link("nvlink", latency_s, bytes_per_s)
    links = Interconnect(link, link)
    return Machine(device(**changes), nodes, per_node, links, links)
