"""Measures batch sizes with a few steps each: for ``--batch-size auto`` and for ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from orchestrator.config.settings import Config
from orchestrator.errors import OutOfMemory
from orchestrator.plan.estimate import ModelFacts, estimate_memory, largest_fitting
from orchestrator.plan.planning import Plan, plan, planned_facts
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.run.plan_file import earlier_global_batch
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Task
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.data.steps import MicroBatch, StepBatch, as_dataset
from orchestrator.train.device.clock import timed_seconds
from orchestrator.train.device.memory import (
    free_cached,
    is_out_of_memory,
    peak_memory,
    reset_peak,
)
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.world import World
from orchestrator.train.worker.batch_size import (
    SAFE,
    BatchProbe,
    BatchSizeResult,
    corrected_batch,
    fastest_batch,
    largest_batch,
)
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.placed_experts import ON_ONE_HOST, PlacedExperts
from orchestrator.types import Choice

_MIN_STEPS_PER_EPOCH = 8  # a batch so large that an epoch has fewer steps learns little
_MAX_UNCOUNTED = 4096  # samples of a step where the number of samples is unknown
_CPU_START = 8
_CPU_SECONDS = 0.4  # of measuring on a CPU, where single steps are short and vary
_CPU_MAX_STEPS = 64
_DUMMIES = 2  # samples of a worker that reads no data; batch norm needs more than one


@dataclass(frozen=True)
class Probed:
    """The run of which steps are measured, and the workers that make them together."""

    config: Config
    plan: Plan
    task: Task
    world: World
    data: object
    experts: PlacedExperts = ON_ONE_HOST
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


@dataclass(frozen=True)
class JointProbe:
    """The state of workers that divide a model, and measure together."""

    experts: PlacedExperts
    heartbeat: Heartbeat
    halvings: int = 0
    """Earlier starts of the run that ran out of memory."""


def with_measured_batch(
    prepared: PreparedRun, world: World, known: dict[str, Any], log: Log, joint: JointProbe
) -> PreparedRun:
    """Return the run with a measured batch size, if it has ``--batch-size auto``.

    A restarted run takes the size that its first start measured: ``known`` holds it."""
    config = prepared.resolved.config
    if config.batch.batch_size != "auto" or config.run.debug:
        return prepared
    batch_size = known.get("batch_size")
    reason = "measured when the run was first started"
    if batch_size is None:
        log.write(kinds.Notice(message="measuring the batch size ..."))
        together = joint if world.size > 1 and divides_model(prepared.plan) else None
        result = find_batch(config, prepared.plan, prepared.task, world, prepared.facts, together)
        batch_size = result.batch_size
        reason = result.reason
    measured = {"batch_size": batch_size} | earlier_global_batch(config, known)
    new_plan = plan(
        config,
        prepared.inventory,
        prepared.facts,
        measured,
        prepared.cluster,
        prepared.in_cluster,
    )
    return replace(prepared, plan=replace(new_plan, batch_size=Choice(batch_size, reason)))


def divides_model(plan: Plan) -> bool:
    """Whether several workers have parts of the model each, and make their steps together."""
    return plan.strategy_facts.divides_experts or plan.sharding.value != "none"


def find_batch(
    config: Config, plan: Plan, task: Task, world: World, facts: ModelFacts, joint: JointProbe | None = None
) -> BatchSizeResult:
    """Measure the batch size for this task on the workers' devices.

    Without ``joint`` each has the whole model: they probe at the same time, each on its own, and all go on
    from the worst result. With it they have parts of the model each, and make the steps together. There a
    worker that runs out of memory ends the group, as in any step; the run starts again with half of it."""
    ranks = world.size if joint is None else world.data_ranks
    max_useful = max(1, _most_samples(config, facts) // ranks)
    data = as_dataset(task.train_data())
    if joint is None:
        # Probes use no collectives: a worker that runs out of memory would leave the others waiting.
        probed = Probed(config, plan, task, World.single_process(world.device), data)
    else:
        probed = Probed(config, plan, task, world, data, joint.experts, joint.heartbeat)
    limit, estimate = _memory_model(config, plan, facts, ranks)

    def probe_on_all(batch: int) -> BatchProbe:
        return _worst(world, probe(probed, batch, _passes(config, batch * ranks)))

    def largest(bytes_of_step: float) -> int:
        return max(1, largest_fitting(lambda batch: estimate(batch) <= bytes_of_step, max_useful))

    if world.device.type != "cuda":
        most = max_useful if joint is None else max(1, largest(limit) >> joint.halvings)
        return fastest_batch(probe_on_all, min(_CPU_START, most), most, float("inf"))
    if joint is None:
        return largest_batch(probe_on_all, limit, largest(limit), max_useful)
    start = largest(limit * SAFE)
    # A start with twice as many ran out of memory.
    most = max(1, (start >> joint.halvings - 1) - 1) if joint.halvings else max_useful
    return corrected_batch(probe_on_all, estimate, limit, max(1, start >> joint.halvings), most)


def _memory_model(
    config: Config, plan: Plan, facts: ModelFacts, ranks: int
) -> tuple[float, Callable[[int], float]]:
    """Return the bytes that steps may take now, and a function that estimates those of a batch."""
    facts = planned_facts(config, facts, plan)
    limit = float("inf") if plan.memory.limit is None else plan.memory.limit
    recompute = plan.activation_checkpointing.value

    def estimate(batch: int) -> float:
        single_pass = _passes(config, batch * ranks) == 1
        return estimate_memory(facts, batch, recompute, None, plan.model_sharding, single_pass).total

    return limit - _growth_bytes(plan, facts), estimate


def _most_samples(config: Config, facts: ModelFacts) -> int:
    """Return the samples that a step can use."""
    if facts.samples is None:
        return config.batch.global_batch_size or _MAX_UNCOUNTED
    return min(facts.samples // _MIN_STEPS_PER_EPOCH, config.batch.global_batch_size or facts.samples)


def _passes(config: Config, samples: int) -> int:
    """Return the passes of a probed step, each of ``samples`` on all workers together.

    Where a step of the run has several, two show its memory: the gradients of the first are alive in the
    second."""
    several = (config.batch.accumulation_steps or 1) > 1 or samples < (config.batch.global_batch_size or 0)
    return 2 if several else 1


def _growth_bytes(plan: Plan, facts: ModelFacts) -> float:
    """Return the memory of experts that may be born: steps that are measured now do not show it."""
    if plan.evolution_rules is None:
        return 0.0
    recompute = plan.activation_checkpointing.value
    single_pass = plan.accumulation_steps.value == 1
    sharding = plan.model_sharding
    now = estimate_memory(facts, plan.batch_size.value, recompute, None, sharding, single_pass)
    return plan.memory.total - now.total


def _worst(world: World, result: BatchProbe) -> BatchProbe:
    """Return the worst result of all workers: most memory, least speed, failed if any failed."""
    failed, peak, slowness = world.all_reduce_max(
        [float(result.peak is None), result.peak or 0.0, -result.samples_per_second]
    )
    return BatchProbe(result.batch, None if failed else peak, 0.0 if failed else -slowness)


def probe(probed: Probed, batch: int, passes: int = 1) -> BatchProbe:
    """Run two whole optimizer steps at a batch size, with a model of their own."""
    device = probed.world.device
    free_cached(device)
    reset_peak(device)
    try:
        speed = _samples_per_second(probed, batch, passes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if probed.world.size > 1:
            message = f"worker {probed.world.rank} ran out of memory in a measured step with a micro-batch of"
            raise OutOfMemory(f"{message} {batch}", batch) from None
        return BatchProbe(batch, None, 0.0)
    finally:
        free_cached(device)
    peak = float(peak_memory(device)["allocated"]) if device.type == "cuda" else 0.0
    return BatchProbe(batch, peak, speed)


def _plan_with_batch(plan: Plan, batch: int) -> Plan:
    # Not compiled: compiling takes far longer than the two steps of a probe.
    return replace(
        plan,
        batch_size=Choice(batch, "probe"),
        global_batch_size=Choice(batch, "probe"),
        compile=Choice(False, "probe"),
    )


def _samples_per_second(probed: Probed, batch_size: int, passes: int) -> float:
    config, world = probed.config, probed.world
    plan = _plan_with_batch(probed.plan, batch_size)
    parts = build_parts(config, plan, probed.task, world, experts=probed.experts)
    stepper = build_stepper(config, world, parts, batch_size, _raise_out_of_memory, probed.heartbeat)
    batch = first_batch(probed.data, world, batch_size, passes)
    on_cpu = world.device.type == "cpu"
    timed_seconds(partial(stepper.run, batch, 0), world.device)  # the warm-up is not counted
    seconds = 0.0
    num_steps = 0
    while num_steps < 1 or (on_cpu and seconds < _CPU_SECONDS and num_steps < _CPU_MAX_STEPS):
        num_steps += 1
        own_seconds = timed_seconds(partial(stepper.run, batch, num_steps), world.device)
        # The slowest worker's time: all stop after the same step.
        seconds += world.all_reduce_max([own_seconds])[0]
    parts.strategy.close()
    return batch.global_samples * num_steps / seconds


def _raise_out_of_memory(event: kinds.Event) -> None:
    """Fail where a run would go on in halves: the batch does not fit."""
    if isinstance(event, kinds.OutOfMemory):
        raise torch.OutOfMemoryError(f"out of memory at a batch of {event.micro_batch}")


def first_batch(data: Any, world: World, size: int, passes: int = 1) -> StepBatch:
    """Return a batch of the first samples, kept on the device. A short data set is repeated.

    Each of ``passes`` micro-batches has the same ``size`` samples of each worker that reads data."""
    together = size * world.data_ranks
    share = world.split_batch(together, size)[world.rank]
    own = share.stop - share.start
    loaded = first_samples(data, own or _DUMMIES, world.device)
    micro_batches = [
        MicroBatch(own, lambda: loaded, number * together + share.start, num_dummies=own or _DUMMIES)
        for number in range(passes)
    ]
    return StepBatch(micro_batches, passes * together, all_have_samples=world.data_ranks == world.size)
