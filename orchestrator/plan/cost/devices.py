"""Costs of GPUs that were not measured here: data sheet values and the share of them that is
achieved. Pure.

The values are in ``devices.json``, whose keys are the fields of the classes below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

from pydantic import TypeAdapter

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import UserError
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.machine import DeviceCosts, Interconnect, Link, LinkKind
from orchestrator.plan.cost.ops import MOVES

_GRID_SIZES = tuple(float(4**power) for power in range(2, 10))  # 16 to 262,144
_MOVED_BYTES = tuple(4.0**power for power in range(6, 16))
_ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_GROUPED_CAPABILITY = (9, 0)  # from which on torch fuses grouped products


@dataclass(frozen=True)
class GpuDataSheet:
    """The data sheet of a GPU."""

    names: tuple[str, ...]
    memory_gb: float
    bandwidth_gb_s: float
    peak_tflops: Mapping[str, float]
    capability: tuple[int, int]
    nvlink_gb_s: float
    pcie_gb_s: float
    source: str


@dataclass(frozen=True)
class AchievedShares:
    """Shares of the peaks that real operations reach, and fixed costs."""

    tensor_products: float
    fp32_products: float
    memory: float
    attention_forward: float
    attention_backward: float
    attention_fp32_forward: float
    attention_fp32_backward: float
    passes: Mapping[str, float]
    """Time of an operation by kind, as a multiple of a plain pass over the same bytes; 1 for kinds
    not named."""
    update_bytes: float
    """Bytes that the update moves per byte of parameters: weights, gradients, two moments, and the
    norm."""
    unaligned: Mapping[str, Mapping[str, float]]
    """Slowdown of unaligned products, by precision and layout."""
    grouped: PiecewiseCurve
    """Time of grouped products as a multiple of one product of all rows, by rows per expert."""
    sustained: float
    """Time of operations within a step as a multiple of their time alone."""
    kernel_s: float
    host: Mapping[str, float]
    """Host overheads in seconds, by the names of ``DeviceCosts``."""


@dataclass(frozen=True)
class LinkEfficiency:
    """The achieved share of a link's bandwidth, and its latency."""

    share: float
    latency_s: float


@dataclass(frozen=True)
class KnownNode:
    """A kind of node: its GPUs, and its network cards for traffic between them."""

    gpu: str
    gpus: int
    nics: int
    net_gbit: float
    """Rate of one card."""
    source: str


@dataclass(frozen=True)
class Catalogue:
    """The contents of ``devices.json``."""

    about: str
    devices: Mapping[str, GpuDataSheet]
    achieved: AchievedShares
    links_about: str
    links: Mapping[str, LinkEfficiency]
    """By the kind of link."""
    nodes: Mapping[str, KnownNode]
    """Known nodes by name, the one that is assumed of a GPU first."""


@cache
def catalogue() -> Catalogue:
    text = files("orchestrator.plan.cost").joinpath("devices.json").read_text(encoding="utf-8")
    return TypeAdapter(Catalogue).validate_json(text)


def known_gpu(name: str) -> GpuDataSheet:
    """Return the data sheet of a GPU by its short name, as in ``--cluster``."""
    known = catalogue().devices
    if name.lower() not in known:
        suggestion = did_you_mean(name.lower(), known)
        raise UserError(f"gpu={name} is not known{suggestion}; known are {', '.join(sorted(known))}")
    return known[name.lower()]


def short_name(full_name: str) -> str | None:
    """Return the short name of a GPU from its full name, such as 'NVIDIA H200'; None if it is not
    known."""
    words = full_name.upper().replace("-", " ").split()
    for short, sheet in catalogue().devices.items():
        # Whole words: an L40S is not an L4.
        if any(_contains(words, alias.upper().split()) for alias in sheet.names):
            return short
    return None


def _contains(words: list[str], phrase: list[str]) -> bool:
    return any(words[start : start + len(phrase)] == phrase for start in range(len(words)))


@cache
def device_of(name: str) -> DeviceCosts:
    """Return the costs of a known GPU.

    An operation takes the longer of its arithmetic and its memory traffic, at the achieved shares
    of the peaks.
    """
    sheet = known_gpu(name)
    achieved = catalogue().achieved
    bandwidth = sheet.bandwidth_gb_s * 1e9 * achieved.memory
    fused = sheet.capability >= _GROUPED_CAPABILITY
    attention = {
        f"{precision} {direction}": _attention_curve(sheet, precision, direction)
        for precision in sheet.peak_tflops
        for direction in ("forward", "backward")
        if precision != "tf32"
    }
    return DeviceCosts(
        name=sheet.names[0],
        memory_bytes=sheet.memory_gb * 1e9,
        asynchronous=True,
        products={precision: {"nn": _product_grid(sheet, precision)} for precision in sheet.peak_tflops},
        moves={kind: _curve(achieved.kernel_s, achieved.passes.get(kind, 1.0), bandwidth) for kind in MOVES},
        attention=attention,
        optimizer=_curve(4 * achieved.kernel_s, achieved.update_bytes, bandwidth),
        grouped=achieved.grouped if fused else PiecewiseCurve((1.0,), (1.0,)),
        unaligned={precision: achieved.unaligned[precision] for precision in sheet.peak_tflops},
        sustained=achieved.sustained,
        **achieved.host,
    )


def _curve(overhead_s: float, multiple: float, bandwidth: float) -> PiecewiseCurve:
    """Return the seconds of moved bytes, of which each is moved a ``multiple`` of times."""
    return PiecewiseCurve(
        _MOVED_BYTES, tuple(overhead_s + multiple * size / bandwidth for size in _MOVED_BYTES)
    )


def _product_grid(sheet: GpuDataSheet, precision: str) -> PiecewiseGrid:
    achieved = catalogue().achieved
    share = achieved.fp32_products if precision == "fp32" else achieved.tensor_products
    flops_per_s = sheet.peak_tflops[precision] * 1e12 * share
    bandwidth = sheet.bandwidth_gb_s * 1e9 * achieved.memory
    element_bytes = _ELEMENT_BYTES[precision]

    def seconds(m: float, k: float, n: float) -> float:
        arithmetic_s = 2 * m * k * n / flops_per_s
        traffic_s = element_bytes * (m * k + k * n + m * n) / bandwidth
        return achieved.kernel_s + max(arithmetic_s, traffic_s)

    values = tuple(seconds(*point) for point in product(_GRID_SIZES, repeat=3))
    return PiecewiseGrid(_GRID_SIZES, _GRID_SIZES, _GRID_SIZES, values)


def _attention_curve(sheet: GpuDataSheet, precision: str, direction: str) -> PiecewiseCurve:
    achieved = catalogue().achieved
    shares = {"forward": achieved.attention_forward, "backward": achieved.attention_backward}
    if precision == "fp32":  # shares of a smaller peak
        shares = {"forward": achieved.attention_fp32_forward, "backward": achieved.attention_fp32_backward}
    flops_per_s = sheet.peak_tflops[precision] * 1e12 * shares[direction]
    return PiecewiseCurve((1e4, 1e12), (1e4 / flops_per_s, 1e12 / flops_per_s))


def links_of(
    name: str, kind: LinkKind, net_gbit: float, nics: int, per_node: int
) -> tuple[Interconnect, Interconnect]:
    """Return the interconnects within a node and between nodes; the devices of a node share its
    network."""
    sheet = known_gpu(name)
    links = catalogue().links
    network = links["network"]
    within_node = links[kind]
    # A data sheet counts both directions of NVLink.
    peak_gb_s = sheet.nvlink_gb_s / 2 if kind == "nvlink" else sheet.pcie_gb_s
    inner = Link(kind, within_node.latency_s, peak_gb_s * 1e9 * within_node.share)
    node_bytes_per_s = net_gbit / 8 * 1e9 * nics * network.share
    # A gradient crosses between nodes once per node, a part of it by each device; tokens leave
    # from each device.
    sums = Link("network", network.latency_s, node_bytes_per_s)
    exchange = Link("network", network.latency_s, node_bytes_per_s / per_node)
    return Interconnect(inner, inner), Interconnect(sums, exchange)
