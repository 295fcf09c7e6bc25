"""Prediction of the time of an optimizer step on devices with known costs. Pure.

A step is the sum of its operations: each has its overhead on the host, products take their
arithmetic at the rate of their size, all others the bytes that they move. A GPU works while the
host continues, over several steps, so the longer of the two counts: the one that lags in one part
of a step catches up in another. Neither can catch up across a point where the host waits for a
value of the device: there the longer counts before it and after it. Gradient all-reduces and the
token exchange are added, less their overlap with the backward pass, and so is the wait for the
device with the most tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.ops import AttentionOp, MicroBatchOps, MoveOp, ProductOp
from orchestrator.plan.cost.traffic import traffic_seconds

PARTS: tuple[str, ...] = (
    "compute",
    "memory",
    "overhead",
    "optimizer",
    "gradients",
    "exchange",
    "gathering",
    "imbalance",
    "overlap",
)
_LOCAL_PARTS = PARTS[:4]  # those that share the processors of the node
HOST_OVERHEAD = "host overhead"
_PART_TEXTS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "overhead": HOST_OVERHEAD,
    "optimizer": "optimizer",
    "gradients": "gradient all-reduce",
    "exchange": "token exchange",
    "gathering": "gathering of parameters",
    "imbalance": "busiest experts",
}
"""Names of the parts for people, as shares of a step and as its limit."""
_MIN_SHARE = 0.02
"""Parts of a step below this share are not listed."""
_ALIGNMENT = 8  # elements; rows of other lengths begin at addresses that tensor cores read slowly


@dataclass(frozen=True)
class StepPrediction:
    """The predicted seconds of a step by part, and its limit."""

    step_seconds: float
    host_seconds: float
    """Seconds that the host is busy, also while the device works."""
    parts: Mapping[str, float]
    """Their sum is the step. ``overhead`` is the time in which the device waits for its host;
    ``overlap`` is negative."""
    bounds: Mapping[str, float]
    """Seconds of the step by the part that determines them, see ``_bounds``; their sum is the step."""
    samples: float

    @property
    def limited_by(self) -> str:
        """The part with the largest share: it has to be faster for a faster step."""
        return _PART_TEXTS[max(self.bounds, key=lambda name: self.bounds[name])]

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds

    def parts_text(self) -> str:
        """Return the parts that determine the step as shares of it, the largest first."""
        shares = {name: seconds / self.step_seconds for name, seconds in self.bounds.items()}
        listed = [name for name, share in shares.items() if share >= _MIN_SHARE]
        listed.sort(key=lambda name: -shares[name])
        return ", ".join(f"{_PART_TEXTS[name]} {shares[name]:.0%}" for name in listed)

    def to_json(self) -> dict[str, Any]:
        names = ("step_seconds", "host_seconds", "samples", "samples_per_second", "limited_by")
        values = {name: getattr(self, name) for name in names}
        bounds = dict(self.bounds)
        return values | {"parts": dict(self.parts), "bounds": bounds}


def predict(ops: MicroBatchOps, machine: Machine, parallelism: Parallelism | None = None) -> StepPrediction:
    """Predict a step in which each device runs its micro-batches of ``ops``."""
    parallelism = parallelism or Parallelism()
    device = machine.device
    rounds = parallelism.micro_batches
    micro_batch = _micro_batch_cost(ops, device, parallelism)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    parts["compute"] = rounds * micro_batch.compute
    parts["memory"] = rounds * micro_batch.memory
    parts["imbalance"] = rounds * micro_batch.imbalance
    parts["optimizer"] = device.sustained * _update_seconds(ops, device, parallelism)
    host_update = ops.tensors * device.tensor_s + device.step_s
    host = rounds * micro_batch.host + host_update
    busy = sum(parts.values())
    host_bound = parts["overhead"] = host
    if device.asynchronous:
        stretches = _stretches(ops, device, parallelism, host_update, parts["optimizer"])
        parts["overhead"] = sum(stretch.exposed for stretch in stretches)
        host_bound = sum(stretch.host for stretch in stretches if stretch.exposed > 0)
    for name in _LOCAL_PARTS:
        parts[name] *= parallelism.crowding
    if parallelism.devices > 1:
        parts |= traffic_seconds(ops, machine, parallelism, busy + parts["overhead"])
    return StepPrediction(
        step_seconds=sum(parts.values()),
        host_seconds=host * parallelism.crowding,
        parts=parts,
        bounds=_bounds(parts, host_bound * parallelism.crowding),
        samples=float(ops.samples * rounds * parallelism.devices),
    )


def _update_seconds(ops: MicroBatchOps, device: DeviceCosts, parallelism: Parallelism) -> float:
    """Return the device seconds of the optimizer's update, without its overhead if the host waits
    for it."""
    floor = 0.0 if device.asynchronous else device.optimizer.floor
    updated_bytes = 4.0 * ops.trained
    if parallelism.sharding != "none":  # each device updates its shard
        updated_bytes -= ops.gradient_bytes * (1 - 1 / parallelism.devices)
    return device.optimizer.at(updated_bytes) - floor


@dataclass(frozen=True)
class _MicroBatchCost:
    """Seconds of a micro-batch: of the device, by part, and of the host."""

    compute: float
    memory: float
    imbalance: float
    host: float

    @property
    def busy(self) -> float:
        return self.compute + self.memory + self.imbalance


def _micro_batch_cost(ops: MicroBatchOps, device: DeviceCosts, parallelism: Parallelism) -> _MicroBatchCost:
    compute, expert_compute = _compute_seconds(ops, device, parallelism)
    memory = sum(move_seconds(move, device) * move.times for move in ops.moves)
    host = (
        ops.operations * device.operation_s
        + ops.launches * device.launch_s
        + ops.views * device.view_s
        + ops.sorts * device.sort_s
    )
    sustained = device.sustained
    return _MicroBatchCost(
        compute=sustained * compute,
        memory=sustained * memory,
        imbalance=sustained * expert_compute * (parallelism.imbalance - 1.0),
        host=host,
    )


@dataclass(frozen=True)
class _Stretch:
    """Seconds of host and device between two points where the host waits for the device."""

    host: float
    device: float

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for its host."""
        return max(0.0, self.host - self.device)


def _stretches(
    ops: MicroBatchOps,
    device: DeviceCosts,
    parallelism: Parallelism,
    host_update: float,
    device_update: float,
) -> list[_Stretch]:
    """Return the stretches of a step, the update at the end included.

    The whole step is one, unless the host waits for the device in each micro-batch.
    """
    rounds = parallelism.micro_batches
    whole = _micro_batch_cost(ops, device, parallelism)
    if ops.before_wait is None:
        return [_Stretch(rounds * whole.host + host_update, rounds * whole.busy + device_update)]
    first = _micro_batch_cost(ops.before_wait, device, parallelism)
    before = _Stretch(first.host, first.busy)
    after = _Stretch(whole.host - first.host, whole.busy - first.busy)
    last = _Stretch(after.host + host_update, after.device + device_update)
    return [before] * rounds + [after] * (rounds - 1) + [last]


def _compute_seconds(
    ops: MicroBatchOps, device: DeviceCosts, parallelism: Parallelism
) -> tuple[float, float]:
    """Return the seconds of all products and attentions of a micro-batch, and those of expert
    products."""
    seconds = [product_seconds(product, device, parallelism.tf32) * product.times for product in ops.products]
    expert_seconds = [s for s, product in zip(seconds, ops.products, strict=True) if product.of_experts]
    attention = sum(attention_seconds(entry, device) * entry.times for entry in ops.attentions)
    return sum(seconds) + attention, sum(expert_seconds)


def _bounds(parts: Mapping[str, float], host_bound: float) -> dict[str, float]:
    """Return the seconds of a step by the part that determines them.

    ``host_bound`` are the seconds of the stretches in which the host is slower than the device. The
    host determines all of them, not only those in which the device waits; the device determines the
    others. Traffic counts as far as it does not overlap with computation.
    """
    device_parts = ("compute", "memory", "optimizer", "imbalance")
    device_s = sum(parts[name] for name in device_parts)
    device_bound = max(0.0, device_s + parts["overhead"] - host_bound)
    bounds = {name: parts[name] * device_bound / device_s if device_s else 0.0 for name in device_parts}
    bounds["overhead"] = host_bound
    hidden = -parts["overlap"]
    for name in ("gradients", "exchange", "gathering"):
        bounds[name] = max(0.0, parts[name] - hidden)
        hidden -= parts[name] - bounds[name]
    return bounds


# --- single operations


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
