"""The scaling table of a cluster that need not exist: a row for each number of devices and
strategy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.estimate import MemoryEstimate, ModelFacts, ModelSharding, estimate_memory
from orchestrator.strategies import DATA_PARALLEL, EXPERT_PARALLEL, SINGLE, StrategyFacts, StrategyName

ScalingKind = Literal["weak", "strong"]

# Assumed of experts under a balance loss: the busiest device has a tenth more rows than the mean.
IMBALANCE = 1.1
CHUNKS_FROM_TOKENS = 4096  # of a device, from which on they are exchanged in two chunks


@dataclass(frozen=True)
class ScalingJob:
    """The training job of a scaling table."""

    trace: Callable[[int, int, int, bool], MicroBatchOps]
    """Return the operations of a micro-batch, from its samples, the hosts of the experts, the chunks, and
    whether one device computes alone."""
    micro_batch: int
    global_batch: int
    experts: int
    tokens_per_sample: int
    tf32: bool
    facts: ModelFacts
    """With the settings that take or save memory."""
    copied_alone: int = 0
    """Parameters of experts with a kept copy in bf16 on a device that computes alone."""
    recompute: bool = False
    samples: int | None = None
    """Training samples, at least as many as a micro-batch and the global batch have; None if only
    reading them all would tell. Weak scaling may need more of them."""

    def memory(
        self, device: DeviceCosts, devices: int, strategy: StrategyFacts, batch: int, single_pass: bool
    ) -> MemoryEstimate:
        """Return the memory of a step on each of several devices, as a plan states it."""
        facts = replace(self.facts, copied_experts=self.copied_alone if devices == 1 else 0)
        sharding = ModelSharding(devices, "experts" if strategy.divides_experts else "none")
        return estimate_memory(facts, batch, self.recompute, device.memory_bytes, sharding, single_pass)


@dataclass(frozen=True)
class ScalingRow:
    """One line of the table."""

    kind: ScalingKind
    strategy: StrategyName
    devices: int
    micro_batch: int
    micro_batches: int
    predicted: StepPrediction
    memory: MemoryEstimate
    speed_up: float

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.devices

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "strategy", "devices", "micro_batch", "micro_batches", "speed_up", "efficiency")
        values = {name: getattr(self, name) for name in names}
        memory = {"memory": self.memory.to_json(), "fits": self.memory.fits}
        return values | self.predicted.to_json() | memory


def counts_up_to(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most`` itself."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def scaling_rows(job: ScalingJob, machine: Machine) -> list[ScalingRow]:
    """Return weak scaling, with a fixed batch per device, and strong scaling, with a fixed global
    batch.

    Both for data parallelism and, with experts, for expert parallelism on at most as many devices
    as experts.
    """
    rows: list[ScalingRow] = []
    for kind in ("weak", "strong"):
        one_device = _predict_row(job, machine, 1, SINGLE, *_share(job, kind, 1))
        for strategy in (DATA_PARALLEL, EXPERT_PARALLEL) if job.experts else (DATA_PARALLEL,):
            rows.extend(_rows(job, machine, kind, strategy, one_device.samples_per_second))
    return rows


def _rows(
    job: ScalingJob, machine: Machine, kind: ScalingKind, strategy: StrategyFacts, base_speed: float
) -> Iterator[ScalingRow]:
    for devices in counts_up_to(machine.devices):
        if strategy.divides_experts and not 1 < devices <= job.experts:
            continue
        if kind == "strong" and devices > job.global_batch:
            continue
        batch, micro_batches = _share(job, kind, devices)
        predicted = _predict_row(job, machine, devices, strategy, batch, micro_batches)
        yield ScalingRow(
            kind=kind,
            strategy=(strategy if devices > 1 else SINGLE).name,
            devices=devices,
            micro_batch=batch,
            micro_batches=micro_batches,
            predicted=predicted,
            memory=job.memory(machine.device, devices, strategy, batch, micro_batches == 1),
            speed_up=predicted.samples_per_second / base_speed,
        )


def _share(job: ScalingJob, kind: ScalingKind, devices: int) -> tuple[int, int]:
    """Return the samples of a micro-batch, and the micro-batches of a device in a step."""
    if kind == "weak":
        return job.micro_batch, 1
    per_device = max(1, job.global_batch // devices)
    micro_batches = -(-per_device // job.micro_batch)
    return per_device // micro_batches, micro_batches


def _predict_row(
    job: ScalingJob, machine: Machine, devices: int, strategy: StrategyFacts, batch: int, micro_batches: int
) -> StepPrediction:
    divided = strategy.divides_experts and devices > 1
    chunks = 2 if divided and batch * job.tokens_per_sample >= CHUNKS_FROM_TOKENS else 1
    # Experts that do not divide evenly are already in the operations, which are those of the
    # device with the most.
    imbalance = IMBALANCE if divided else 1.0
    ops = job.trace(batch, devices if divided else 1, chunks, devices == 1)
    parallelism = Parallelism(
        devices=devices,
        strategy=(strategy if devices > 1 else SINGLE).name,
        micro_batches=micro_batches,
        imbalance=imbalance,
        chunks=chunks,
        tf32=job.tf32,
    )
    return predict(ops, machine, parallelism)


def by_kind(rows: list[ScalingRow]) -> Mapping[tuple[ScalingKind, StrategyName], list[ScalingRow]]:
    """Return the rows as tables, each of which begins with one device."""
    tables: dict[tuple[ScalingKind, StrategyName], list[ScalingRow]] = {}
    for one_device in (row for row in rows if row.devices == 1):
        kind = one_device.kind
        of_more = [row for row in rows if row.kind == kind and row.devices > 1]
        for row in of_more:
            tables.setdefault((kind, row.strategy), [one_device]).append(row)
        if not of_more:
            tables[kind, one_device.strategy] = [one_device]
    return tables
