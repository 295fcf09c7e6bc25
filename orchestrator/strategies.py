"""The facts of each strategy that settings, plan, cost model, record and driver need.

Their code asks for a fact, and never compares the name of a strategy. ``orchestrator/train/strategies``
has the side that computes. A leaf module: it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from orchestrator.types import MIB

StrategyName = Literal["single", "data_parallel", "live_data_parallel", "expert_parallel"]

_ONLY_EXPERTS = "experts are divided there"
_ON_EACH = "every worker has all experts"
_WITHOUT_DDP = "gradients are summed without DDP there"
_OWN_STATISTICS = "its hosts keep their own statistics"


@dataclass(frozen=True)
class Refusal:
    """Values of a setting that a strategy cannot serve."""

    setting: str
    values: tuple[object, ...]
    reason: str
    unless_asked: bool = False
    """Whether the strategy serves them after all if the settings ask for it by name."""


@dataclass(frozen=True)
class StrategyFacts:
    """The facts of one strategy for the parts of the product that do not compute."""

    name: StrategyName
    asked_with: tuple[str, str]
    """The setting, and its value, that ask for the strategy."""
    instead: str = "data_parallel"
    """Names a strategy that serves what this one refuses."""
    whole_experts: str = ""
    """Words for messages that say which workers have all experts; empty where the experts are divided."""
    in_process: bool = False
    """Whether the process that starts the run trains, without workers."""
    replaces_workers: bool = False
    """Whether a lost worker is replaced while the others keep their processes; standby hosts help then."""
    first_bucket_bytes: int = 0
    """Size of the first all-reduce of gradients, if it is smaller than the others."""
    copies_gradients: bool = False
    """Whether gradients are reduced in copies, which take memory next to them."""
    refusals: tuple[Refusal, ...] = ()
    own_settings: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Settings that have an effect with this strategy alone, and the values with which they ask for none."""

    @property
    def divides_experts(self) -> bool:
        """Whether each worker has some of the experts, and tokens travel to them."""
        return not self.whole_experts


SINGLE = StrategyFacts(
    "single", ("workers", "1"), whole_experts="one process has all experts", in_process=True
)

DATA_PARALLEL = StrategyFacts(
    "data_parallel",
    ("parallel_strategy", "data_parallel"),
    whole_experts=_ON_EACH,
    first_bucket_bytes=MIB,  # of DDP
)

_REFUSED_BY_HOSTS = (
    Refusal("sync_batchnorm", (True,), _OWN_STATISTICS),
    Refusal("static_graph", (True,), _WITHOUT_DDP),
    Refusal("find_unused_parameters", (True,), _WITHOUT_DDP),
    Refusal("gradient_as_bucket_view", (False,), _WITHOUT_DDP),
)

LIVE_DATA_PARALLEL = StrategyFacts(
    "live_data_parallel",
    ("recovery", "live"),
    instead="recovery restart",
    whole_experts=_ON_EACH,
    replaces_workers=True,
    copies_gradients=True,
    refusals=(
        *_REFUSED_BY_HOSTS,
        Refusal("cpu_offload", (True,), "hosts that can be replaced keep their shards on the device"),
    ),
)
"""Data parallel on hosts that are replaced one by one: a dense model, whole on each or in shards."""

EXPERT_PARALLEL = StrategyFacts(
    "expert_parallel",
    ("parallel_strategy", "expert_parallel"),
    replaces_workers=True,
    copies_gradients=True,
    refusals=(
        Refusal("sharding", ("zero2", "zero3"), "it shards the dense part alone there", unless_asked=True),
        Refusal("cpu_offload", (True,), _ONLY_EXPERTS),
        *_REFUSED_BY_HOSTS,
        Refusal("recovery", ("restart",), "a lost host is replaced there while the others keep their state"),
    ),
    own_settings={
        "gate": ("replicated",),
        "placement": ("auto",),
        "exchange_chunks": (None,),
        "exchange_rows": ("counted",),
        "expert_replicas": (1,),
        "rebalance": ("auto", "off"),
    },
)

STRATEGIES: Mapping[str, StrategyFacts] = MappingProxyType(
    {facts.name: facts for facts in (SINGLE, DATA_PARALLEL, LIVE_DATA_PARALLEL, EXPERT_PARALLEL)}
)


def recorded_strategy(name: object) -> StrategyFacts | None:
    """Return the strategy that a record names, which may be damaged; None for another name."""
    return next((facts for facts in STRATEGIES.values() if facts.name == name), None)
