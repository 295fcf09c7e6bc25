"""Settings of training on several devices: which take part, what each holds, and how long they
wait for each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.sections.checks import Switch, at_least, listed
from orchestrator.strategies import DATA_PARALLEL, LIVE_DATA_PARALLEL, STRATEGIES, StrategyFacts

ParallelStrategy = Literal["auto", "data_parallel", "expert_parallel"]
Backend = Literal["auto", "nccl", "gloo"]
Sharding = Literal["auto", "none", "zero2", "zero3"]
ExchangeRows = Literal["counted", "bounded"]
GatePlace = Literal["replicated", "primary"]
Recovery = Literal["auto", "live", "restart"]
PLACEMENTS = ("auto", "round_robin")

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_LIVE_TIMEOUT_S = 10
_RESTART_TIMEOUT_S = 120


@dataclass(frozen=True)
class ParallelSettings:
    """Training on several devices: which take part, what each holds, and how long they wait for
    each other."""

    parallel_strategy: ParallelStrategy = "auto"
    """auto trains data-parallel on two GPUs or more and inside a Ray job, or expert-parallel if
    a model with experts does not fit on each device; data_parallel and expert_parallel force it,
    on CPUs too."""
    workers: int | Literal["auto"] = "auto"
    """Workers (in expert parallel: hosts) that train together, one device each; auto takes every
    GPU, or a few CPU workers if there is none."""
    devices: tuple[int, ...] = ()
    """GPUs of this machine to use, as CUDA counts them: 0,2 or 0 2. Default: all."""
    backend: Backend = "auto"
    """Library for the collectives between workers; auto takes nccl on GPUs and gloo on CPUs."""
    sharding: Sharding = "auto"
    """State that is divided among the workers: none, gradients and optimizer (zero2), parameters
    too (zero3); auto decides by the memory. With expert_parallel it is that of the dense part, and
    experts stay whole on their hosts."""
    cpu_offload: bool = False
    """Keep sharded parameters and optimizer state in host memory: less GPU memory, slower steps.
    Needs zero2 or zero3."""
    sync_batchnorm: bool = False
    """Compute batch norm over the samples of all workers instead of each worker's own; on GPUs."""
    gate: GatePlace = "replicated"
    """Expert parallel: run the gate on every host over its share of the batch, or (primary) on
    the first host over the whole batch."""
    placement: str = "auto"
    """Expert parallel: placement of the experts. auto uses their cost and the measured speed of
    the devices; round_robin; or the path or address of a .json file."""
    exchange_chunks: int | None = None
    """Expert parallel: parts in which a layer's tokens are exchanged, so that experts compute
    while the next part is sent. Default: by the plan."""
    exchange_rows: ExchangeRows = "counted"
    """Expert parallel: counted: hosts exchange the number of a layer's rows first, and wait for it.
    bounded: they send a bounded number, with padding, and do not wait; a step with more rows is
    repeated."""
    share_by_speed: Switch = "auto"
    """Divide the global batch in proportion to measured speed; auto: if the workers' devices differ."""
    bucket_cap_mb: int | None = None
    """MiB of gradients per all-reduce, without sharding. Default: torch's own (25)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order, so that DDP can plan
    its all-reduces once."""
    find_unused_parameters: bool = False
    """Search for parameters that a step did not use; costs time in every step."""
    broadcast_buffers: Switch = "auto"
    """Copy the first worker's buffers to all before each step: on, all of them; auto, running
    statistics that are not synchronized."""
    gradient_as_bucket_view: bool = True
    """Keep gradients in the buckets of the all-reduce; without it there is a second copy of them."""
    recovery: Recovery = "auto"
    """What follows the loss of a worker. live: another host takes its place, and the others keep their
    processes and continue from snapshots in memory; for expert_parallel, and for data parallel of a model
    without experts. restart: all workers start again from the newest checkpoint (Ray Train). auto: live
    with expert_parallel, else restart."""
    spares: int = 0
    """Live recovery: standby hosts, with everything loaded, that replace a lost host; each
    needs a device: a GPU, or a CPU slot of the cluster."""
    max_failures: int = 3
    """Failures (a lost worker, a lost node, a lack of memory) that a run survives; one more ends it.
    Failures far apart in steps do not add up: a failure counts until the run is 100 steps past the
    furthest step that it had reached by then. Steps that are repeated are no progress."""
    collective_timeout: int | None = None
    """Seconds without progress in a step after which a worker counts as stuck. Default: 10 with
    live recovery, where only that host is replaced, else 120."""
    resource_timeout: int = 300
    """Seconds to wait for a cluster with an autoscaler to provide missing devices."""
    ray_address: str = "auto"
    """auto joins the Ray cluster that runs here (or that RAY_ADDRESS names), or starts one;
    local always starts one; HOST:PORT joins that one."""
    nccl_debug: bool = False
    """Write NCCL's messages to the workers' logs."""

    @property
    def asked_strategy(self) -> StrategyFacts:
        """The strategy that was asked for; with auto data parallel, until the model is known."""
        asked = STRATEGIES.get(self.parallel_strategy, DATA_PARALLEL)
        needs_hosts = self.recovery == "live" and not asked.replaces_workers
        return LIVE_DATA_PARALLEL if needs_hosts else asked

    def step_timeout_s(self, hosts: bool) -> int:
        """Return how long workers, or with ``hosts`` those that can be replaced, may wait in a step."""
        if self.collective_timeout is not None:
            return self.collective_timeout
        return _LIVE_TIMEOUT_S if hosts else _RESTART_TIMEOUT_S

    def __post_init__(self) -> None:
        if isinstance(self.workers, int):
            at_least("workers", self.workers, 1)
        for device in self.devices:
            at_least("devices", device, 0)
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices is {listed(self.devices)}; name each GPU once")
        for name in ("exchange_chunks", "bucket_cap_mb", "collective_timeout", "resource_timeout"):
            at_least(name, getattr(self, name), 1)
        at_least("max_failures", self.max_failures, 0)
        at_least("spares", self.spares, 0)
        if self.placement not in PLACEMENTS and not self.placement.endswith(".json"):
            raise ValueError(
                f"placement is {self.placement!r}; it must be auto, round_robin or the path of a .json file"
            )
        _check_address(self.ray_address)


def _check_address(address: str) -> None:
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"ray_address is {address!r}; Ray client addresses are not supported. "
            "Submit a job to the cluster instead: "
            "ray job submit --address http://HOST:8265 --working-dir . -- python -m orchestrator train"
        )
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(
            f"ray_address is {address!r}; it must be auto, local or HOST:PORT, as 'ray start' shows it"
        )
