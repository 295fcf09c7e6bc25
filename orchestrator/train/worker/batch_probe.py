"""Measures batch sizes with a few steps each: for ``--batch-size auto`` and for ``bench``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import MemoryEstimate, ModelFacts, estimate_memory, largest_fitting
from orchestrator.plan.planning import Plan, plan, planned_facts
from orchestrator.record.files.log import Log
from orchestrator.run.plan_file import earlier_global_batch
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.train.data.first_samples import with_random_access
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import MicroBatch, StepBatch, as_dataset
from orchestrator.train.device.batches import to_device
from orchestrator.train.device.clock import timed_seconds
from orchestrator.train.device.memory import (
    free_cached,
    is_out_of_memory,
    peak_memory,
    reset_peak,
)
from orchestrator.train.group.world import World
from orchestrator.train.worker.batch_size import (
    BatchProbe,
    BatchSizeResult,
    fastest_batch,
    largest_batch,
)
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.types import Choice

_MIN_STEPS_PER_EPOCH = 8  # a batch so large that an epoch has fewer steps learns little
_MAX_UNCOUNTED = 4096  # samples of a step where the number of samples is unknown
_CPU_START = 8
_CPU_SECONDS = 0.4  # of measuring on a CPU, where single steps are short and vary
_CPU_MAX_STEPS = 64


def with_measured_batch(prepared: PreparedRun, world: World, known: dict[str, Any], log: Log) -> PreparedRun:
    """Return the run with a measured batch size, if it has ``--batch-size auto``.

    A restarted run takes the size that its first start measured: ``known`` holds it."""
    config = prepared.resolved.config
    if config.batch.batch_size != "auto" or config.run.debug:
        return prepared
    if prepared.plan.sharding.value != "none":
        raise UserError(
            "--batch-size auto measures whole models, and --sharding divides them; "
            "leave it out (the plan estimates one), or give a number"
        )
    batch_size = known.get("batch_size")
    reason = "measured when the run was first started"
    if batch_size is None:
        log.write("notice", message="measuring the batch size ...")
        result = find_batch(config, prepared.plan, prepared.task, world, prepared.facts)
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


def find_batch(config: Config, plan: Plan, task: Task, world: World, facts: ModelFacts) -> BatchSizeResult:
    """Measure the batch size for this task on this device.

    Several workers probe at the same time, each on its own, and all go on from the worst result."""
    max_samples = _most_samples(config, facts)
    max_useful = max(1, max_samples // world.size)
    data = as_dataset(task.train_data())
    limit = float("inf") if plan.memory.limit is None else plan.memory.limit
    # Probes use no collectives: a worker that runs out of memory would leave the others waiting.
    single = World.single_process(world.device)

    def probe_on_all(batch: int) -> BatchProbe:
        passes = _passes(config, batch * world.size)
        return _worst(world, probe(config, plan, task, single, data, batch, passes))

    if world.device.type != "cuda":
        return fastest_batch(probe_on_all, min(_CPU_START, max_useful), max_useful, float("inf"))
    facts = planned_facts(config, facts, plan)
    limit -= _growth_bytes(plan, facts)
    recompute = plan.activation_checkpointing.value

    def estimated(batch: int) -> MemoryEstimate:
        single_pass = _passes(config, batch * world.size) == 1
        return estimate_memory(facts, batch, recompute, limit, single_pass=single_pass)

    estimate = largest_fitting(estimated, max_useful)
    return largest_batch(probe_on_all, limit, max(1, estimate), max_useful)


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
    now = estimate_memory(facts, plan.batch_size.value, recompute, None, single_pass=single_pass)
    return plan.memory.total - now.total


def _worst(world: World, result: BatchProbe) -> BatchProbe:
    """Return the worst result of all workers: most memory, least speed, failed if any failed."""
    failed, peak, slowness = world.all_reduce_max(
        [float(result.peak is None), result.peak or 0.0, -result.samples_per_second]
    )
    return BatchProbe(result.batch, None if failed else peak, 0.0 if failed else -slowness)


def probe(
    config: Config, plan: Plan, task: Task, world: World, data: object, batch: int, passes: int = 1
) -> BatchProbe:
    """Run two whole optimizer steps at a batch size, with a model of their own."""
    free_cached(world.device)
    reset_peak(world.device)
    try:
        speed = _samples_per_second(config, _plan_with_batch(plan, batch), task, world, data, passes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return BatchProbe(batch, None, 0.0)
    finally:
        free_cached(world.device)
    peak = float(peak_memory(world.device)["allocated"]) if world.device.type == "cuda" else 0.0
    return BatchProbe(batch, peak, speed)


def _plan_with_batch(plan: Plan, batch: int) -> Plan:
    # Not compiled: compiling takes far longer than the two steps of a probe.
    return replace(
        plan,
        batch_size=Choice(batch, "probe"),
        global_batch_size=Choice(batch, "probe"),
        compile=Choice(False, "probe"),
    )


def _samples_per_second(
    config: Config, plan: Plan, task: Task, world: World, data: object, passes: int
) -> float:
    batch_size = plan.batch_size.value
    stepper = build_stepper(
        config,
        world,
        build_parts(config, plan, task, world),
        batch_size,
        _raise_out_of_memory,
    )
    batch = first_batch(data, world, batch_size, passes)
    on_cpu = world.device.type == "cpu"
    timed_seconds(partial(stepper.run, batch, 0), world.device)  # the warm-up is not counted
    seconds = 0.0
    num_steps = 0
    while num_steps < 1 or (on_cpu and seconds < _CPU_SECONDS and num_steps < _CPU_MAX_STEPS):
        num_steps += 1
        seconds += timed_seconds(partial(stepper.run, batch, num_steps), world.device)
    return batch.global_samples * num_steps / seconds


def _raise_out_of_memory(event: str, **fields: object) -> None:
    """Fail where a run would go on in halves: the batch does not fit."""
    if event == "oom":
        raise torch.OutOfMemoryError(f"out of memory at a batch of {fields['micro_batch']}")


def first_batch(data: Any, world: World, size: int, passes: int = 1) -> StepBatch:
    """Return a batch of the first samples, kept on the device. A short data set is repeated.

    Each of ``passes`` micro-batches has the same ``size`` samples."""
    data = with_random_access(data, size)
    if isinstance(data, Gatherable):
        loaded = to_device(data.gather(torch.arange(size) % len(data)), world.device, pin=False)
    else:
        repeated = _Repeated(data, size)
        options = LoaderOptions(purpose="a measurement")
        feed = open_feed(
            repeated,
            world,
            global_batch=size,
            micro_batch=size,
            seed=None,
            loader=options,
        )
        loaded = next(feed.steps(0)).micro_batches[0].fetch()
    micro_batches = [MicroBatch(size, lambda: loaded) for _ in range(passes)]
    return StepBatch(micro_batches, passes * size, all_have_samples=True)


class _Repeated:
    """A data set of a given length that repeats the samples of another one."""

    def __init__(self, data: Any, length: int) -> None:
        self._data = data
        self._length = length
        if hasattr(data, "collate"):
            self.collate = self._data.collate

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> object:
        return self._data[index % len(self._data)]
