"""The costs of one device and its host, measured for the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orchestrator.measure.calibration.op_times import (
    attention_curves,
    group_seconds,
    grouped_curve,
    move_curves,
    product_grids,
    unaligned_factors,
    update_curve,
)
from orchestrator.measure.calibration.timer import ON_CPU, ON_GPU, TINY, MeasuredSizes, Timer
from orchestrator.measure.calibration.whole_steps import make_yardstick, with_overhead, with_sustained
from orchestrator.plan.cost.calibration import Reference
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.machine import DeviceCosts
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.train.device.memory import free_cached

ProgressCallback = Callable[[str], None]
"""Receives the name of what is measured next."""

_GROUPED_CAPABILITY = (9, 0)  # from which on torch fuses grouped products
_BF16_CAPABILITY = (8, 0)
_TINY_REFERENCES = 5


@dataclass(frozen=True)
class CalibrationScope:
    """The extent of a calibration: the CPU or a GPU, the sizes of operations, and the numbers of
    workers."""

    on_gpu: bool
    sizes: MeasuredSizes
    workers: tuple[int, ...]
    references: int | None = None
    """Number of reference steps; None for all."""

    @classmethod
    def of(cls, inventory: Inventory, tiny: bool = False) -> CalibrationScope:
        on_gpu = bool(inventory.gpus)
        devices = len(inventory.gpus) if on_gpu else inventory.cores
        sizes = ON_GPU if on_gpu else ON_CPU
        return cls(
            on_gpu=on_gpu,
            sizes=TINY if tiny else sizes,
            workers=(1, 2) if devices > 1 else (1,),
            references=_TINY_REFERENCES if tiny else None,
        )


@dataclass(frozen=True)
class DeviceMeasurement:
    """The costs of a device, the reference steps they were fitted to, and the speed of the host
    meanwhile."""

    costs: DeviceCosts
    references: tuple[Reference, ...]
    yardstick_s: tuple[float, ...] = ()


def measure_device(
    inventory: Inventory, scope: CalibrationScope, device: torch.device, progress: ProgressCallback
) -> DeviceMeasurement:
    """Measure one device and its host."""
    timer = Timer(device, scope.sizes.seconds)
    costs = _operation_costs(inventory, scope, timer, progress)
    progress("the host's overhead per operation")
    if not scope.on_gpu:
        return DeviceMeasurement(*with_overhead(costs, inventory, device, timer, scope.references))
    measured = _with_whole_steps(costs, inventory, scope, timer, progress)
    del timer  # with its pools of operands
    free_cached(device)
    return measured


def _operation_costs(
    inventory: Inventory, scope: CalibrationScope, timer: Timer, progress: ProgressCallback
) -> DeviceCosts:
    """Measure the device's seconds of single operations."""
    sizes = scope.sizes
    precisions = precisions_of(inventory, scope.on_gpu)
    products = {}
    for precision in precisions:
        progress(f"products in {precision}")
        products[precision] = product_grids(timer, sizes, precision)
    progress("other operations and the optimizer")
    gpu = inventory.gpus[0] if scope.on_gpu else None
    moves = move_curves(timer, sizes)
    attention = attention_curves(timer, sizes, [name for name in precisions if name != "tf32"])
    optimizer = update_curve(timer, sizes)
    grouped = None
    if gpu is not None:
        fused = gpu.capability >= _GROUPED_CAPABILITY
        grouped = grouped_curve(timer) if fused else PiecewiseCurve((1.0,), (1.0,))
    unaligned = {}
    group_s = 0.0
    if gpu is None:
        group_s = group_seconds(timer)
    elif sizes != TINY:
        unaligned = {precision: unaligned_factors(timer, precision) for precision in precisions}
    return DeviceCosts(
        name=gpu.name if gpu else inventory.cpu_name,
        memory_bytes=float(gpu.memory_total if gpu else inventory.ram_total),
        asynchronous=gpu is not None,
        products=products,
        moves=moves,
        attention=attention,
        optimizer=optimizer,
        grouped=grouped,
        group_s=group_s,
        unaligned=unaligned,
    )


def _with_whole_steps(
    costs: DeviceCosts,
    inventory: Inventory,
    scope: CalibrationScope,
    timer: Timer,
    progress: ProgressCallback,
) -> DeviceMeasurement:
    """Measure the costs of a GPU that need whole steps, and the host's speed before and after
    them."""
    device = timer.device
    measure_yardstick = make_yardstick(costs, inventory, device)
    before = measure_yardstick()
    costs, references = with_overhead(costs, inventory, device, timer, scope.references)
    after = measure_yardstick()
    if scope.sizes != TINY:
        progress("large steps")
        costs, large = with_sustained(costs, inventory, device)
        references += large
    yardstick_s = tuple(map(statistics.mean, zip(before, after, strict=True)))
    return DeviceMeasurement(costs, references, yardstick_s)


def precisions_of(inventory: Inventory, on_gpu: bool) -> list[str]:
    """Return the precisions that the device has units for."""
    if not on_gpu:
        return ["fp32", "bf16"] if inventory.cpu_bf16 else ["fp32"]
    if inventory.gpus[0].capability >= _BF16_CAPABILITY:
        return ["fp32", "tf32", "bf16", "fp16"]
    return ["fp32", "fp16"]
