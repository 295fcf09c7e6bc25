"""Short runs at a given batch size: for ``--batch-size auto`` and for ``bench``."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch

from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts, largest_fitting
from orchestrator.plan.planning import Plan
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.train.data import Feed, LoaderOptions, MicroBatch, StepBatch, as_dataset, to_device
from orchestrator.train.parts.memory import free_cached, is_out_of_memory, peak_memory, reset_peak
from orchestrator.train.parts.world import World
from orchestrator.train.step import Stepper
from orchestrator.train.worker.batch_size import BatchProbe, BatchSizeResult, fastest_batch, largest_batch
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.run_dir import PreparedRun, earlier_global_batch
from orchestrator.types import Choice

_MIN_STEPS_PER_EPOCH = 8  # a batch so large that an epoch has fewer steps learns little
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
        config, prepared.inventory, prepared.facts, measured, prepared.cluster, prepared.in_cluster
    )
    return replace(prepared, plan=replace(new_plan, batch_size=Choice(batch_size, reason)))


def find_batch(config: Config, plan: Plan, task: Task, world: World, facts: ModelFacts) -> BatchSizeResult:
    """Measure the batch size for this task on this device.

    Several workers probe at the same time, each on its own, and all go on from the worst result."""
    max_samples = min(facts.samples // _MIN_STEPS_PER_EPOCH, config.batch.global_batch_size or facts.samples)
    max_useful = max(1, max_samples // world.size)
    data = as_dataset(task.train_data())
    limit = float("inf") if plan.memory.limit is None else plan.memory.limit

    def try_(batch: int) -> BatchTrial:
        return agreed(world, probe(config, plan, task, World.single_process(world.device), data, batch))

    if world.device.type != "cuda":
        return fastest_batch(try_, min(8, most), most, float("inf"))
    guess = largest_fitting(facts, most, plan.activation_checkpointing.value, limit)
    return largest_batch(try_, limit, max(1, guess), most)


def agreed(world: World, found: BatchTrial) -> BatchTrial:
    """The worst of what the workers found: the most memory, the least speed, and failed if it failed anywhere."""
    failed, peak, slowness = world.all_reduce_max(
        [float(found.peak is None), found.peak or 0.0, -found.samples_per_second]
    )
    return BatchTrial(found.batch, None if failed else peak, 0.0 if failed else -slowness)


def probe(config: Config, plan: Plan, task: Task, world: World, data: object, batch: int) -> BatchTrial:
    """Two whole optimizer steps at a batch size, with a model of their own."""
    free_cached(world.device)
    reset_peak(world.device)
    try:
        speed = _measure(config, at_batch(plan, batch), task, world, data, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return BatchTrial(batch, None, 0.0)
    finally:
        free_cached(world.device)
    peak = float(peak_memory(world.device)["allocated"]) if world.device.type == "cuda" else 0.0
    return BatchTrial(batch, peak, speed)


def at_batch(plan: Plan, batch: int) -> Plan:
    return replace(
        plan,
        batch_size=Choice(batch, "probe"),
        global_batch_size=Choice(batch, "probe"),
        compile=Choice(False, "probe"),
    )


def _measure(config: Config, plan: Plan, task: Task, world: World, data: object, batch: int) -> float:
    stepper = build_stepper(config, world, build_parts(config, plan, task, world), batch, _raise_on_oom)
    portion = first_batch(data, world, batch)
    _one_step(stepper, portion, 0)
    begun, steps = perf_counter(), 0
    while steps < 1 or (world.device.type == "cpu" and perf_counter() - begun < _SECONDS and steps < 64):
        steps += 1
        _one_step(stepper, portion, steps)
    return batch * steps / (perf_counter() - begun)


def _one_step(stepper: Stepper, portion: StepBatch, step: int) -> None:
    stepper.run(portion, step)
    if stepper.world.device.type == "cuda":
        torch.cuda.synchronize(stepper.world.device)


def _raise_on_oom(event: str, **fields: object) -> None:
    """A probe that would go on in halves has failed."""
    if event == "oom":
        raise torch.OutOfMemoryError(f"out of memory at a batch of {fields['micro_batch']}")


def first_batch(data: object, world: World, batch: int) -> StepBatch:
    """A batch of the first samples, begun again where there are too few. It stays on the device."""
    if isinstance(data, Gatherable):
        loaded = to_device(data.gather(torch.arange(size) % len(data)), world.device, pin=False)
    else:
        repeated = _Repeated(data, size)
        options = LoaderOptions()
        feed = Feed(repeated, world, global_batch=size, micro_batch=size, seed=None, loader=options)
        loaded = next(feed.steps(0)).micro_batches[0].fetch()
    return StepBatch([MicroBatch(size, lambda: loaded)], size, all_have_samples=True)


class _Repeated:
    def __init__(self, data: object, length: int) -> None:
        self._data, self._length = data, length
        if hasattr(data, "collate"):
            self.collate = data.collate  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> object:
        return self._data[index % len(self._data)]  # pyright: ignore[reportIndexIssue, reportArgumentType]
