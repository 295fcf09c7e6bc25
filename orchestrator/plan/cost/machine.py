"""Devices, links and clusters as the cost model describes them, and how a job uses them. Pure.

The fields of ``DeviceCosts``, ``Link`` and ``Interconnect`` are keys of the calibration file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid
from orchestrator.plan.estimate import ShardingForm
from orchestrator.strategies import STRATEGIES, StrategyFacts, StrategyName

LinkKind = Literal["none", "shared memory", "nvlink", "pcie", "network"]


@dataclass(frozen=True)
class DeviceCosts:
    """Measured or known costs of a device and its host, in seconds."""

    name: str
    memory_bytes: float
    asynchronous: bool
    """The host continues while the device computes."""
    products: Mapping[str, Mapping[str, PiecewiseGrid]]
    """Seconds of a product, by precision and layout."""
    moves: Mapping[str, PiecewiseCurve]
    """Seconds by bytes, for each kind."""
    attention: Mapping[str, PiecewiseCurve]
    """Seconds of one head by its FLOP, by 'precision forward' and 'precision backward'."""
    optimizer: PiecewiseCurve
    """Seconds of the update by bytes of parameters."""
    grouped: PiecewiseCurve | None = None
    """Time of grouped products as a multiple of one product of all rows, by rows per expert.

    None if the products of a group run one after another."""
    unaligned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Time of products with a size that is no multiple of eight, as a multiple, by precision and
    layout."""
    group_s: float = 0.0
    """Overhead of each product of a group that runs one after another."""
    operation_s: float = 0.0
    """Host overhead of an operation of torch."""
    launch_s: float = 0.0
    """Host overhead of a kernel launched from this project's Python."""
    sort_s: float = 0.0
    """Host overhead of a sort, in addition to that of an operation."""
    view_s: float = 0.0
    """Host overhead of a view."""
    tensor_s: float = 0.0
    """Host overhead of a parameter tensor in an update."""
    step_s: float = 0.0
    """Host overhead of a step."""
    sustained: float = 1.0
    """Time of operations within a step as a multiple of their time alone: the device is hot,
    caches are shared."""

    @property
    def floor(self) -> float:
        """Seconds of the smallest operation. If the host waits for each operation, this is its
        overhead, which is counted by the number of operations."""
        return 0.0 if self.asynchronous else self.moves["plain"].floor


@dataclass(frozen=True)
class Link:
    """A link between two devices: a message takes ``latency_s``, and its bytes divided by
    ``bytes_per_s``."""

    kind: LinkKind
    latency_s: float
    bytes_per_s: float


NO_LINK = Link("none", 0.0, math.inf)


@dataclass(frozen=True)
class Interconnect:
    """The links of a device for gradient all-reduces (``sums``) and for the token exchange."""

    sums: Link
    exchange: Link


@dataclass(frozen=True)
class Machine:
    """A cluster of nodes with equal devices, with one interconnect within a node and one between
    nodes."""

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
    """How a job uses the devices: ``devices`` of them, each with ``micro_batches`` in a step."""

    devices: int = 1
    strategy: StrategyName = "single"
    micro_batches: int = 1
    imbalance: float = 1.0
    """Rows of the busiest device's experts, as a multiple of the mean."""
    chunks: int = 1
    tf32: bool = False
    """fp32 products run in tf32."""
    crowding: float = 1.0
    """Workers per set of processors, if there are more workers than processors."""
    sharding: ShardingForm = "none"
    """How the replicated parameters are sharded."""
    expert_replicas: int = 1
    """Groups of devices that each hold every expert."""

    @property
    def strategy_facts(self) -> StrategyFacts:
        return STRATEGIES[self.strategy]
