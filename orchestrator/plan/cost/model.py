"""How long an optimizer step will take and how much memory it will need, on devices that are
described by a handful of measured figures. Pure.

A step is the sum of what its operations cost one after another: each its overhead on the host,
products their arithmetic at the rate of their size, all others the bytes that they move. A GPU
works while the host goes on, from step to step, so there the longer of the two counts: who is
behind in one part of a step catches up in another. Only where the host waits for a figure of the
device neither can: then the longer counts before that and after it. To that come the sums of
gradients and the exchange of tokens between devices, less what is hidden behind the backward pass,
and waiting for the device with the most tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.ops import AttentionOp, MessageOp, MicroBatchOps, ProductOp
from orchestrator.plan.estimate import MemoryEstimate
from orchestrator.types import StrategyName

LinkKind = Literal["none", "shared memory", "nvlink", "pcie", "network"]
PARTS: tuple[str, ...] = (
    "compute",
    "memory",
    "overhead",
    "optimizer",
    "gradients",
    "exchange",
    "imbalance",
    "overlap",
)
_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # as DDP has them
_BACKWARD_SHARE = 2 / 3  # of the arithmetic of a micro-batch
_PEER_S = 0.5e-6  # to hand one more message to a link that is busy with others
_SUMS = 1  # small messages beside the gradients: counts and losses of a step


@dataclass(frozen=True)
class DeviceCosts:
    """What a device was measured, or is known, to do. Times are seconds."""

    name: str
    memory_bytes: float
    asynchronous: bool
    """The host goes on while the device computes."""
    products: Mapping[str, Mapping[str, PiecewiseGrid]]
    """By precision and layout."""
    moves: Mapping[str, PiecewiseCurve]
    """Seconds by bytes, for each kind."""
    attention: Mapping[str, PiecewiseCurve]
    """Seconds of one head by its FLOP, by 'precision forward' and 'precision backward'."""
    optimizer: PiecewiseCurve
    """Seconds of the update by bytes of parameters."""
    grouped: PiecewiseCurve | None = None
    """Grouped products against one product of all rows: how many times as long, by rows per
    expert. None where they are computed one after another."""
    unaligned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """How many times as long products take of which a size is no multiple of eight, by precision
    and layout."""
    group_s: float = 0.0
    """Of each of these, beyond its arithmetic."""
    operation_s: float = 0.0
    """Of the host for each operation of torch."""
    launch_s: float = 0.0
    """Of the host for each that goes through Python of ours."""
    sort_s: float = 0.0
    """Of the host for each sort, beyond that."""
    view_s: float = 0.0
    tensor_s: float = 0.0
    """Of the host for each parameter in an update."""
    step_s: float = 0.0
    """Of the host for a step as such."""
    sustained: float = 1.0
    """How many times as long the device takes for what it does within a step as by itself: when it
    is hot, and its caches shared."""
    reserved_bytes: float = 0.0
    """That the libraries take for themselves."""

    @property
    def floor(self) -> float:
        """Of the smallest operation: where the host waits for it, that is its overhead, which is
        counted by operations."""
        return 0.0 if self.asynchronous else self.moves["plain"].floor


@dataclass(frozen=True)
class Link:
    """Between two devices: a message takes ``latency_s`` and its bytes over ``bytes_per_s``."""

    kind: LinkKind
    latency_s: float
    bytes_per_s: float


NO_LINK = Link("none", 0.0, math.inf)


@dataclass(frozen=True)
class Interconnect:
    """What a device sums gradients and exchanges tokens over."""

    sums: Link
    exchange: Link


@dataclass(frozen=True)
class Machine:
    """A cluster's shape: nodes of alike devices, joined within a node and, by a share of its
    network each, between nodes."""

    device: DeviceCosts
    nodes: int = 1
    per_node: int = 1
    inner: Interconnect = Interconnect(NO_LINK, NO_LINK)
    outer: Interconnect = Interconnect(NO_LINK, NO_LINK)

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Parallelism:
    """How the work is shared out: ``devices`` alike, each with ``micro_batches`` of its work in a
    step."""

    devices: int = 1
    strategy: StrategyName = "single"
    micro_batches: int = 1
    imbalance: float = 1.0
    """Rows of the busiest device's experts, as a multiple of the mean."""
    chunks: int = 1
    tf32: bool = False
    """fp32 products in tf32."""
    crowding: float = 1.0
    """Workers that share the processors of one, where there are more of them than processors."""


@dataclass(frozen=True)
class StepPrediction:
    """A step: its seconds, what they are made of (overlap is negative), the memory of a device,
    and what limits it."""

    step_seconds: float
    host_seconds: float
    """That the host is busy with it; the overhead is what of that the device does not hide."""
    parts: Mapping[str, float]
    memory: MemoryEstimate
    limited_by: str
    samples: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        names = ("step_seconds", "host_seconds", "samples", "samples_per_second", "limited_by")
        return {name: getattr(self, name) for name in names} | {
            "parts": dict(self.parts),
            "memory": self.memory.to_json(),
        }


def predict(work: MicroBatchOps, machine: Machine, team: Parallelism | None = None) -> StepPrediction:
    """A step of ``work`` on each device of the team."""
    team = team or Parallelism()
    device, rounds, alike = machine.device, team.micro_batches, _round(work, machine.device, team)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    parts["compute"], parts["memory"], parts["imbalance"] = (
        rounds * part for part in (alike.compute, alike.memory, alike.imbalance)
    )
    update = device.optimizer.at(4.0 * work.parameters) - (
        0.0 if device.asynchronous else device.optimizer.floor
    )
    parts["optimizer"] = device.sustained * update
    last = work.tensors * device.tensor_s + device.step_s
    host, busy = rounds * alike.host + last, sum(parts.values())
    parts["overhead"] = (
        _not_hidden(work, device, team, last, parts["optimizer"]) if device.asynchronous else host
    )
    for name in PARTS[:4]:
        parts[name] *= team.crowding
    if team.devices > 1:
        parts |= _traffic(work, machine, team, busy + parts["overhead"])
    memory, samples = predicted_memory(work, device, team), float(work.samples * rounds * team.devices)
    hides = (
        device.asynchronous and parts["overhead"] > 0
    )  # the host hides the device, not the other way round
    return StepPrediction(
        sum(parts.values()),
        host * team.crowding,
        parts,
        memory,
        _limit(parts, host if hides else parts["overhead"]),
        samples,
    )


@dataclass(frozen=True)
class _MicroBatchCost:
    """Seconds of a micro-batch: of the device, by what they are for, and of the host."""

    compute: float
    memory: float
    imbalance: float
    host: float

    @property
    def busy(self) -> float:
        return self.compute + self.memory + self.imbalance


def _round(work: MicroBatchOps, device: DeviceCosts, team: Parallelism) -> _MicroBatchCost:
    compute, experts = _compute(work, device, team)
    memory = sum(
        max(0.0, device.moves[move.kind].at(move.bytes) - device.floor) * move.times for move in work.moves
    )
    host = (
        work.operations * device.operation_s
        + work.launches * device.launch_s
        + work.views * device.view_s
        + work.sorts * device.sort_s
    )
    times = device.sustained
    return _MicroBatchCost(times * compute, times * memory, times * experts * (team.imbalance - 1.0), host)


def _not_hidden(
    work: MicroBatchOps, device: DeviceCosts, team: Parallelism, last_host: float, last_busy: float
) -> float:
    """How much longer the host takes than the device, with what each has to do at the end of a
    step: over the whole step, or, where the host waits, before that and after it."""
    whole, rounds = _round(work, device, team), team.micro_batches
    if work.before_wait is None:
        return max(0.0, rounds * (whole.host - whole.busy) + last_host - last_busy)
    first = _round(work.before_wait, device, team)
    before, after = first.host - first.busy, (whole.host - first.host) - (whole.busy - first.busy)
    return (
        rounds * max(0.0, before) + (rounds - 1) * max(0.0, after) + max(0.0, after + last_host - last_busy)
    )


def _compute(work: MicroBatchOps, device: DeviceCosts, team: Parallelism) -> tuple[float, float]:
    """Seconds of all products of a micro-batch, and of those of experts."""
    seconds = [
        (product_seconds(product, device, team.tf32) * product.times, product.of_experts)
        for product in work.products
    ]
    attention = sum(attention_seconds(entry, device) * entry.times for entry in work.attentions)
    return sum(s for s, _ in seconds) + attention, sum(s for s, of_experts in seconds if of_experts)


def product_seconds(product: ProductOp, device: DeviceCosts, tf32: bool = False) -> float:
    """One product beyond the overhead of any operation; of experts, together or one after
    another."""
    precision = "tf32" if tf32 and product.precision == "fp32" else product.precision
    grids = device.products.get(precision) or device.products["fp32"]
    grid = grids[product.layout] if product.layout in grids else next(iter(grids.values()))
    m, k, n = product.m, product.k, product.n
    if product.batch == 1:
        return max(
            0.0, grid.at(m, k, n) * _misfit(product, device.unaligned.get(precision, {})) - device.floor
        )
    if device.grouped is None or not product.of_experts:
        small = grid.seconds[0]  # of a group's products there is no smaller one: the rest is arithmetic
        return product.batch * (device.group_s + max(0.0, grid.at(m, k, n) - small))
    rows = product.k if product.layout == "tn" else product.m
    whole = grid.at(m, k * product.batch, n) if product.layout == "tn" else grid.at(m * product.batch, k, n)
    return max(0.0, whole * device.grouped.at(min(rows, device.grouped.sizes[-1])) - device.floor)


def _misfit(product: ProductOp, unaligned: Mapping[str, float]) -> float:
    """Only sizes that lie along rows count: of the first factor, or of the result."""
    along = {"nt": (product.k, product.n), "nn": (product.k, product.n), "tn": (product.m, product.n)}[
        product.layout
    ]
    return unaligned.get(product.layout, 1.0) if any(size % 8 for size in along) else 1.0


def attention_seconds(entry: AttentionOp, device: DeviceCosts) -> float:
    direction = "backward" if entry.backward else "forward"
    curve = device.attention.get(f"{entry.precision} {direction}") or device.attention[f"fp32 {direction}"]
    return entry.heads * curve.at(entry.flops / entry.heads / entry.times)


def _traffic(work: MicroBatchOps, machine: Machine, team: Parallelism, alone: float) -> dict[str, float]:
    """Messages between devices, and how much of them is hidden behind the backward pass of a step
    that takes ``alone`` without them. On CPUs nothing is: messages take the same cores."""
    first = _FIRST_BUCKET_BYTES if team.strategy == "data_parallel" else 0
    buckets = max(1, (first > 0) + math.ceil(max(0.0, work.gradient_bytes - first) / _BUCKET_BYTES))
    each = sum_seconds(work.gradient_bytes / buckets, machine, team.devices)
    gradients = buckets * each + _SUMS * sum_seconds(512, machine, team.devices)
    exchange = team.micro_batches * sum(
        exchange_seconds(m, machine, team.devices) * m.times for m in work.messages
    )
    hidden = 0.0
    if machine.device.asynchronous:
        backward = _BACKWARD_SHARE * alone / team.micro_batches
        hidden = min((buckets - 1) * each, backward)
        if team.chunks > 1:
            hidden += min(exchange * (team.chunks - 1) / team.chunks, max(0.0, alone - hidden))
    return {"gradients": gradients, "exchange": exchange, "overlap": -hidden}


def sum_seconds(size: float, machine: Machine, devices: int) -> float:
    """A sum over all devices: first within nodes, then between them, and back. Bandwidth as in a
    ring, latency as in a tree."""
    inside = min(devices, machine.per_node)
    nodes = math.ceil(devices / machine.per_node)
    return _ring(size, machine.inner.sums, inside) + _ring(size, machine.outer.sums, nodes)


def _ring(size: float, link: Link, members: int) -> float:
    if members < 2:
        return 0.0
    return (
        math.ceil(math.log2(members)) * link.latency_s + 2 * (members - 1) / members * size / link.bytes_per_s
    )


def exchange_seconds(message: MessageOp, machine: Machine, devices: int) -> float:
    """Each device sends all others their part at once: what stays in the node and what leaves it
    travel side by side."""
    if devices < 2:
        return 0.0
    inside = min(devices, machine.per_node) - 1
    outside = devices - 1 - inside
    near, far = machine.inner.exchange, machine.outer.exchange
    near_s = near.latency_s + message.bytes * inside / (devices - 1) / near.bytes_per_s if inside else 0.0
    far_s = far.latency_s + message.bytes * outside / (devices - 1) / far.bytes_per_s if outside else 0.0
    return max(near_s, far_s) + (devices - 2) * _PEER_S


def predicted_memory(work: MicroBatchOps, device: DeviceCosts, team: Parallelism) -> MemoryEstimate:
    """Weights, moments, and the most that is alive beside them; gradients are part of that, and
    shown apart."""
    gradients = 4.0 * work.parameters
    copies = (
        work.gradient_bytes if team.devices > 1 and team.strategy == "expert_parallel" else 0.0
    )  # sums travel in buckets
    alive = max(work.peak_bytes, gradients)
    return MemoryEstimate(
        parameters=4.0 * work.parameters,
        gradients=gradients + copies,
        optimizer=8.0 * work.parameters,
        activations=alive - gradients + device.reserved_bytes,
        gate=0.0,
        limit=device.memory_bytes,
    )


def _limit(parts: Mapping[str, float], host: float) -> str:
    names = {
        "compute": "arithmetic",
        "memory": "memory bandwidth",
        "overhead": "host overhead",
        "optimizer": "optimizer",
        "gradients": "gradient sums",
        "exchange": "token exchange",
        "imbalance": "busiest experts",
    }
    exposed = dict(parts) | {"overhead": host, "gradients": max(0.0, parts["gradients"] + parts["overlap"])}
    return names[max(names, key=lambda name: exposed[name])]
