"""GPUs that are known without being measured: data sheet figures and the share of them that is
achieved, from ``devices.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

from pydantic import TypeAdapter

from orchestrator.config.settings import did_you_mean
from orchestrator.errors import UserError
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.cost.model import DeviceCosts, Interconnect, Link, LinkKind
from orchestrator.plan.cost.ops import MOVES
from orchestrator.types import MIB

_SIZES = tuple(float(4**power) for power in range(2, 10))  # 16 to 262,144
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class GpuDataSheet:
    """A GPU's data sheet."""

    names: tuple[str, ...]
    memory_gb: float
    bandwidth_gb_s: float
    peak_tflops: Mapping[str, float]
    capability: tuple[int, int]
    nvlink_gb_s: float
    pcie_gb_s: float
    source: str


@dataclass(frozen=True)
class HostCosts:
    about: str
    operation_s: float
    launch_s: float
    sort_s: float
    view_s: float
    tensor_s: float
    step_s: float


@dataclass(frozen=True)
class GroupedSlowdown:
    rows: tuple[float, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class AchievedShares:
    """Shares of the peak that real operations reach, and fixed costs."""

    about: str
    tensor_products: float
    fp32_products: float
    memory: float
    attention_forward: float
    attention_backward: float
    attention_fp32_forward: float
    attention_fp32_backward: float
    passes: Mapping[str, float]
    """How many times as long as a plain pass over the same bytes an operation of this kind takes,
    where it does."""
    update_bytes: float
    """Moved for each byte of parameters: read and written weights, gradients and two moments, and
    the norm."""
    unaligned: Mapping[str, Mapping[str, float]]
    """By precision and layout."""
    grouped: GroupedSlowdown
    sustained: float
    """How many times as long all of that takes within a step."""
    kernel_s: float
    host: HostCosts
    reserved_mib: float


@dataclass(frozen=True)
class LinkEfficiency:
    share: float
    latency_s: float


@dataclass(frozen=True)
class LinkCatalogue:
    about: str
    nvlink: LinkEfficiency
    pcie: LinkEfficiency
    network: LinkEfficiency


@dataclass(frozen=True)
class Catalogue:
    """All of ``devices.json``."""

    about: str
    devices: Mapping[str, GpuDataSheet]
    achieved: AchievedShares
    links: LinkCatalogue


@cache
def catalogue() -> Catalogue:
    return TypeAdapter(Catalogue).validate_json(
        files("orchestrator.plan.cost").joinpath("devices.json").read_text(encoding="utf-8")
    )


def known_gpu(name: str) -> GpuDataSheet:
    """The GPU of this short name, as ``--cluster`` has it."""
    known = catalogue().devices
    if name.lower() not in known:
        raise UserError(
            f"gpu={name} is not known{did_you_mean(name.lower(), known)}; known are {', '.join(sorted(known))}"
        )
    return known[name.lower()]


def short_name(full: str) -> str | None:
    """The short name of a GPU that calls itself so, 'NVIDIA H200' for one; None where it is not
    known."""
    words = full.upper().replace("-", " ").split()
    for short, entry in catalogue().devices.items():
        if any(_within(alias.upper().split(), words) for alias in entry.names):
            return short
    return None


def _within(part: list[str], whole: list[str]) -> bool:
    return any(whole[place : place + len(part)] == part for place in range(len(whole)))


@cache
def device_of(name: str) -> DeviceCosts:
    """The cost model's device for a known GPU: the longer of arithmetic and memory traffic at the
    achieved shares of their peaks."""
    known, achieved = known_gpu(name), catalogue().achieved
    bandwidth, host = known.bandwidth_gb_s * 1e9 * achieved.memory, achieved.host
    moved = tuple(4.0**power for power in range(6, 16))
    rows = achieved.grouped
    fused = known.capability >= (9, 0)
    return DeviceCosts(
        name=known.names[0],
        memory_bytes=known.memory_gb * 1e9,
        asynchronous=True,
        products={precision: {"nn": _grid(known, precision)} for precision in known.peak_tflops},
        moves={
            kind: PiecewiseCurve(
                moved,
                tuple(
                    achieved.kernel_s + achieved.passes.get(kind, 1.0) * size / bandwidth for size in moved
                ),
            )
            for kind in MOVES
        },
        attention={
            f"{p} {d}": _attention(known, p, d)
            for p in known.peak_tflops
            if p != "tf32"
            for d in ("forward", "backward")
        },
        optimizer=PiecewiseCurve(
            moved, tuple(4 * achieved.kernel_s + achieved.update_bytes * size / bandwidth for size in moved)
        ),
        grouped=PiecewiseCurve(rows.rows, rows.times) if fused else PiecewiseCurve((1.0,), (1.0,)),
        unaligned={precision: achieved.unaligned[precision] for precision in known.peak_tflops},
        operation_s=host.operation_s,
        launch_s=host.launch_s,
        sort_s=host.sort_s,
        view_s=host.view_s,
        tensor_s=host.tensor_s,
        step_s=host.step_s,
        sustained=achieved.sustained,
        reserved_bytes=achieved.reserved_mib * MIB,
    )


def _grid(known: GpuDataSheet, precision: str) -> PiecewiseGrid:
    achieved = catalogue().achieved
    share = achieved.fp32_products if precision == "fp32" else achieved.tensor_products
    rate, bandwidth = (
        known.peak_tflops[precision] * 1e12 * share,
        known.bandwidth_gb_s * 1e9 * achieved.memory,
    )
    size = _BYTES[precision]

    def seconds(m: float, k: float, n: float) -> float:
        return achieved.kernel_s + max(2 * m * k * n / rate, size * (m * k + k * n + m * n) / bandwidth)

    return PiecewiseGrid(
        _SIZES, _SIZES, _SIZES, tuple(seconds(*point) for point in product(_SIZES, repeat=3))
    )


def _attention(known: GpuDataSheet, precision: str, direction: str) -> PiecewiseCurve:
    achieved = catalogue().achieved
    shares = (achieved.attention_forward, achieved.attention_backward)
    if precision == "fp32":  # of a smaller peak
        shares = (achieved.attention_fp32_forward, achieved.attention_fp32_backward)
    share = shares[direction == "backward"]
    rate = known.peak_tflops[precision] * 1e12 * share
    return PiecewiseCurve((1e4, 1e12), (1e4 / rate, 1e12 / rate))


def links_of(
    name: str, kind: LinkKind, net_gbit: float, nics: int, per_node: int
) -> tuple[Interconnect, Interconnect]:
    """What joins the devices of a node, and nodes: of the network, each device has its share of
    the node's."""
    known, figures = known_gpu(name), catalogue().links
    inner = figures.nvlink if kind == "nvlink" else figures.pcie
    within = Link(
        kind,
        inner.latency_s,
        (known.nvlink_gb_s / 2 if kind == "nvlink" else known.pcie_gb_s) * 1e9 * inner.share,
    )
    node = net_gbit / 8 * 1e9 * nics * figures.network.share
    # sums cross between nodes once for a whole node, one part by each of its devices; tokens leave
    # from each device
    return Interconnect(within, within), Interconnect(
        Link("network", figures.network.latency_s, node),
        Link("network", figures.network.latency_s, node / per_node),
    )
