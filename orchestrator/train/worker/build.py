"""One worker's parts put together from a config, a plan and a task: the only place that knows them all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.bank import without_memory
from experts.expert_state import is_expert_parallel, remote_expert_names
from experts.model import mix, place
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import set_environment
from orchestrator.plan.planning import Plan
from orchestrator.record.log import Log
from orchestrator.tasks.load import user_code
from orchestrator.tasks.task import Task
from orchestrator.train.checkpoint.snapshots import HostSnapshots, Snapshots, SnapshotTarget, merge_snapshots
from orchestrator.train.checkpoint.state import Progress, restore, restore_model
from orchestrator.train.checkpoint.store import CheckpointStore, Contents, Skipped, load
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.data import Feed, LoaderOptions, seed_host
from orchestrator.train.evaluate import Evaluation
from orchestrator.train.loop import Cadence, Training
from orchestrator.train.parts.clock import DevicePhaseClock, PhaseClock
from orchestrator.train.parts.compiling import Compiled
from orchestrator.train.parts.memory import limit_memory, recompute_blocks
from orchestrator.train.parts.optim import ScheduledOptimizer, build_adamw, warmup_schedule
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World
from orchestrator.train.training import Cadence, Training
from orchestrator.train.worker.build_model import ModelParts, build_parts, build_stepper
from orchestrator.train.worker.resume import ResumeFrom, restore_checkpoint, restore_snapshots
from orchestrator.train.worker.run_dir import PreparedRun


@dataclass(frozen=True)
class ModelParts:
    """A model ready to learn."""

    model: nn.Module
    strategy: Strategy
    optimizer: ScheduledOptimizer
    precision: Precision
    compiled: Compiled | None


def build_parts(
    config: Config,
    plan: Plan,
    task: Task,
    world: World,
    tell: Callable[..., None] = lambda *_, **__: None,
    host_of: Sequence[Sequence[int]] | None = None,
) -> ModelParts:
    """The task's model on its device, with optimizer, precision and compilation as planned. ``host_of`` says on which worker
    each layer's experts live."""
    if host_of is not None and plan.compile.value and plan.activation_checkpointing.value:
        raise UserError(
            "--compile and --activation-checkpointing on do not go together on expert hosts; leave one of them out"
        )
    model = build_model(config, task, world, host_of)
    model.train()
    if config.parallel.sync_batchnorm and world.size > 1:
        model = convert_sync_batchnorm(model)
    replica = build_strategy(config, plan, task, world, model, tell, host_of is not None)
    for _, layer in moe_layers(model):  # what the plan leaves open, each bank decides by its sizes
        layer.bank.kernel = "loop" if plan.expert_kernel.value == "loop" else config.device.expert_kernel
    if plan.activation_checkpointing.value:
        recompute_blocks(model, None if plan.compile.value else replica.context)
    compiled = (
        Compiled(model, config.device.compile_mode, config.device.compile_parts)
        if plan.compile.value
        else None
    )
    return ModelParts(
        model,
        replica,
        build_optimizer(config, plan, task, model),
        Precision(plan.precision.value, world.device),
        compiled,
    )


def build_model(
    config: Config, task: Task, world: World, host_of: Sequence[Sequence[int]] | None
) -> nn.Module:
    """The task's model: whole, or with this host's experts alone. Where the task can fill a model that is already there, the
    others never come to be: experts are built without memory, cut, and given memory where they live."""
    seed_host(mix(config.run.seed, "build"))
    torch.manual_seed(mix(config.run.seed, "build"))
    fill = getattr(task, "initialise", None)
    with user_code("building the model"):
        if host_of is None or fill is None:
            model = build_checked_model(task)
            if fill is not None:
                fill(model)
            if host_of is not None:
                place(model, host_of, world.rank)
            return model
        with without_memory():
            model = build_checked_model(task)
        place(model, host_of, world.rank)
        for _, layer in moe_layers(model):
            layer.bank.materialise()
        fill(model)
    return model


def build_strategy(
    config: Config,
    plan: Plan,
    task: Task,
    world: World,
    model: nn.Module,
    tell: Callable[..., None],
    hosted: bool = False,
) -> Strategy:
    """The model on its device: alone, the same on each worker, in parts on all of them, or with experts of its own."""
    settings = config.parallel
    if world.size > 1 and hosted:
        model.to(world.device)
        check_placement(model, world.device)
        return ExpertParallelStrategy(
            model, task, world, plan.exchange_chunks.value, settings.bucket_cap_mb, _broadcast(config, model)
        )
    if world.size > 1 and plan.sharding.value != "none":
        world.broadcast([tensor.detach() for tensor in [*model.parameters(), *persistent_buffers(model)]])
        shard_model(
            model, world, whole_parameters=plan.sharding.value == "zero2", offload=settings.cpu_offload
        )
        return FSDPStrategy(model, task, world)
    model.to(world.device)
    check_placement(model, world.device)
    if world.size == 1:
        return Strategy(model, task)
    buffers = tuple(_broadcast(config, model))
    options = DDPOptions(
        settings.bucket_cap_mb,
        settings.static_graph,
        settings.find_unused_parameters,
        settings.gradient_as_bucket_view,
        buffers,
    )
    return DDPStrategy(
        model, task, world, options, lambda message: tell("warning", kind="gradients", message=message)
    )


def _broadcast(config: Config, model: nn.Module) -> list[Tensor]:
    """Buffers that are the main worker's at the beginning of each step."""
    own = (
        [] if config.parallel.sync_batchnorm else running_statistics(model)
    )  # what a forward pass makes different on each worker
    return {"auto": own, "on": persistent_buffers(model), "off": []}[config.parallel.broadcast_buffers]


def build_optimizer(config: Config, plan: Plan, task: Task, model: nn.Module) -> ScheduledOptimizer:
    """The task's own optimizer and schedule where it brings them, else AdamW and the configured schedule."""
    own = getattr(task, "build_optimizer", None)
    trained = [p for p in model.parameters() if p.requires_grad]
    if (
        is_expert_parallel(model) and not trained
    ):  # all that is trained lives elsewhere, and optimizers want something
        trained = [nn.Parameter(torch.zeros(0, device=next(model.parameters()).device))]
    with user_code("building the optimizer"):
        optimizer = own(trained) if own else None
        schedule = getattr(task, "schedule", lambda: None)()
        if schedule is not None:
            float(schedule(0))
    if optimizer is None:
        optimizer = build_adamw(trained, config.optim, plan.fused_optimizer.value)
    if schedule is not None:
        return ScheduledOptimizer(optimizer, schedule)
    return ScheduledOptimizer(
        optimizer,
        warmup_schedule(config.optim.schedule, plan.warmup_steps.value, plan.total_steps.value),
        config.optim.schedule,
    )


def check_placement(model: nn.Module, device: torch.device) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != device.type:
            raise UserError(
                f"{name} of the model is on {tensor.device} after moving it to {device}; register it as a parameter or buffer"
            )


def build_feed(plan: Plan, task: Task, world: World, seed: int) -> Feed:
    with user_code("reading the training data"):
        data = task.train_data()
    feeding = LoaderOptions(plan.loader_workers.value, plan.prefetch.value, plan.data_on_device.value)
    return Feed(
        data,
        world,
        global_batch=plan.global_batch_size.value,
        micro_batch=plan.batch_size.value,
        seed=seed,
        feeding=feeding,
    )


def build_evaluation(
    config: Config, plan: Plan, task: Task, world: World, parts: ModelParts
) -> Evaluation | None:
    with user_code("reading the validation data"):
        data = task.validation_data() if hasattr(task, "validation_data") else None
    if data is None:
        return None
    size = plan.eval_batch_size.value
    feeding = LoaderOptions(plan.loader_workers.value, plan.prefetch.value, plan.data_on_device.value)
    feed = Feed(
        data, world, global_batch=size * world.data_ranks, micro_batch=size, seed=None, feeding=feeding
    )
    metric = config.run.early_stopping_metric
    if metric != "loss":  # a wrong name is better found now than after an epoch
        tried = Evaluation(parts.strategy, feed, parts.precision, max_batches=1, name="try")()["metrics"]
        if metric not in tried:
            raise UserError(
                f"--early-stopping-metric {metric!r} is not among the validation metrics: {', '.join(['loss', *tried])}"
            )
    return Evaluation(parts.strategy, feed, parts.precision, 2 if config.run.debug else None)


def build_stepper(
    config: Config, world: World, parts: ModelParts, micro_batch: int, tell: Callable[..., None]
) -> Stepper:
    return Stepper(
        world=world,
        strategy=parts.strategy,
        optimizer=parts.optimizer,
        precision=parts.precision,
        micro_batch=micro_batch,
        seed=config.run.seed,
        clip_norm=config.optim.clip_norm,
        clock=DevicePhaseClock(world.device) if world.device.type == "cuda" else PhaseClock(),
        emit=tell,
        compiled=parts.compiled,
    )


@dataclass(frozen=True)
class WorkerContext:
    """One worker of a run: its job, its world, and where it records."""

    prepared: PreparedRun
    world: World
    run_dir: Path
    log: Log


def build_training(
    worker: WorkerContext,
    host_of: Sequence[Sequence[int]] | None = None,
    resume: ResumeFrom | None = None,
    snapshots: SnapshotTarget | None = None,
) -> Training:
    """Build the model, the data and the optimizer, and restore the state that the run starts from.

    ``host_of`` is the rank of each layer's experts, ``snapshots`` the target of this host's snapshots."""
    config, plan, task = worker.prepared.resolved.config, worker.prepared.plan, worker.prepared.task
    world, log = worker.world, worker.log
    parts = build_parts(config, plan, task, world, log.write, host_of)
    store = CheckpointStore(worker.run_dir / "checkpoints", config.checkpoint.keep, mend=world.is_main)
    feed = build_feed(plan, task, world, config.run.seed)
    evaluation = build_evaluation(config, plan, task, world, parts)
    # Everything above may draw random numbers. A resumed run restores its own generators below.
    seed_host(mix(config.run.seed, "run"))
    if resume is not None and resume.snapshots:
        progress = restore_snapshots(resume.snapshots, parts, world, log)
    else:
        progress = restore_checkpoint(config, parts, store, world, log, again=resume is not None)
    if config.run.early_stopping_patience and evaluation is None:
        raise UserError("--early-stopping-patience needs validation data; the task has none")
    total_steps = _last_step(config, plan, feed, progress)
    if total_steps != plan.total_steps.value:
        message = f"the run now ends at step {total_steps}; the schedule follows"
        log.write("warning", kind="schedule", message=message)
        parts.optimizer.reschedule(plan.warmup_steps.value, total_steps)
    micro_batch = feed.micro_batch if parts.strategy.lockstep else feed.largest_micro_batch
    state = (parts.model, parts.optimizer.inner, parts.precision)
    return Training(
        stepper=build_stepper(config, world, parts, micro_batch, log.write),
        feed=feed,
        cadence=build_cadence(config, plan, total_steps),
        progress=progress,
        log=log,
        saver=CheckpointWriter(store, *state, world, log),
        evaluation=evaluation,
        snapshots=Snapshots(config.checkpoint.snapshot_every, snapshots, *state, world)
        if snapshots
        else None,
    )


def build_cadence(config: Config, plan: Plan, total_steps: int) -> Cadence:
    return Cadence(
        total_steps=total_steps,
        epochs=config.run.epochs,
        log_every=plan.log_every.value,
        evaluate_every=config.watch.evaluate_every,
        checkpoint_every=config.checkpoint.checkpoint_every,
        monitor_every=config.watch.gpu_log_interval if config.watch.monitor_gpu else 0,
        empty_cache_every=config.device.empty_cache_every,
        patience=config.run.early_stopping_patience,
        metric=config.run.early_stopping_metric,
    )


def _last_step(config: Config, plan: Plan, feed: Feed, progress: Progress) -> int:
    """Where the run ends, counted from where it stands: with another batch size than before, not where the plan says."""
    if progress.step == 0 or config.run.debug:
        return plan.total_steps.value
    this_epoch = -(-(feed.samples - progress.position) // feed.global_batch)
    later = max(0, config.run.epochs - progress.epoch - 1) * feed.steps_per_epoch
    end = progress.step + (this_epoch + later if progress.epoch < config.run.epochs else 0)
    return min(end, config.run.max_steps or end)


def check_start_checkpoint(config: Config) -> None:
    """Refuse a checkpoint that is not there before anything is made."""
    resume, init_from = config.checkpoint.resume, config.checkpoint.init_from
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        raise UserError(
            f"--resume {resume}: there is no such folder; give a checkpoint or a run folder, or auto"
        )
    if init_from is not None and not init_from.is_dir():
        raise UserError(f"--init-from {init_from}: there is no such folder; give a checkpoint")


def restore_snapshots(copies: HostSnapshots, parts: ModelParts, world: World, log: Log) -> Progress:
    """Where the run begins again: where the hosts' copies of their state were taken."""
    contents = merge_snapshots(copies, world.rank, remote_expert_names(parts.model))
    progress = restore(contents, parts.model, parts.optimizer.inner, parts.precision)
    log.write("resume", step=progress.step, path=None, source="memory", skipped=[])
    return progress


def restore_checkpoint(
    config: Config, parts: ModelParts, store: CheckpointStore, world: World, log: Log, again: bool = False
) -> Progress:
    """Where the run begins: afresh, from given weights, or where a checkpoint left off. Workers read the same one: the main
    worker looks for it, and puts away what is damaged or later, before the others read. A run that begins ``again`` after a
    failure goes on from its own newest checkpoint; until it has one, it begins where it was asked to."""
    check_start_checkpoint(config)
    settings = config.checkpoint
    if again and world.broadcast_value(
        "own checkpoints", len(store.newest_first()) if world.is_main else None
    ):
        settings = replace(settings, resume="auto", init_from=None)
    if settings.init_from is not None:
        path, contents, _ = _chosen(str(settings.init_from), store, world, remote_expert_names(parts.model))
        assert contents is not None
        restore_model(contents, parts.model)
        log.write("resume", step=0, path=str(path), skipped=[], weights_only=True)
        return Progress()
    if settings.resume is None:
        return Progress()
    path, contents, skipped = _chosen(settings.resume, store, world, remote_expert_names(parts.model))
    progress = (
        Progress()
        if contents is None
        else restore(contents, parts.model, parts.optimizer.inner, parts.precision)
    )
    if world.is_main:
        store.abandon_after(progress.step)
    notes = [{"path": entry.path.name, "reason": entry.reason} for entry in skipped]
    log.write("resume", step=progress.step, path=path.name if path else None, skipped=notes)
    return progress


def _chosen(
    resume: str, store: CheckpointStore, world: World, without: Set[str]
) -> tuple[Path | None, Contents | None, list[Skipped]]:
    """The checkpoint to begin with: the main worker chooses, and all read it, each what it needs of it."""
    found, skipped = find_checkpoint(resume, store) if world.is_main else (None, [])
    world.wait_for_main("checkpoint")  # to look for a good one takes as long as it is large
    chosen = world.broadcast_value(
        "checkpoint", {"path": str(found[0]) if found else None} if world.is_main else None
    )["path"]
    if chosen is None:
        return None, None, skipped
    return (*found, skipped) if found else (Path(chosen), load(Path(chosen), without), skipped)


def find_checkpoint(
    resume: str, store: CheckpointStore
) -> tuple[tuple[Path, Contents] | None, list[Skipped]]:
    """``auto``: the run's own newest good checkpoint. A path: that checkpoint, or the newest good one of that run."""
    if resume == "auto":
        return store.newest_good()
    path = Path(resume)
    if (path / "manifest.json").exists() or not (path / "checkpoints").is_dir():
        return (path, load(path)), []
    found, skipped = CheckpointStore(path / "checkpoints", mend=False).newest_good()
    if found is None:
        raise UserError(f"--resume {resume}: no good checkpoint there ({len(skipped)} damaged)")
    return found, skipped


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put the caller's random generators back after the run: two runs in one notebook are not to begin alike unasked."""
    host, drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        try:
            yield
        finally:
            random.setstate(host)
            np.random.set_state(drawn)


@contextmanager
def torch_settings(config: Config, plan: Plan, device: torch.device) -> Iterator[None]:
    """Process-wide switches of torch, set for the run and put back after it."""
    before = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.set_num_threads(plan.threads.value)
    torch.set_float32_matmul_precision("high" if plan.tf32.value else "highest")
    torch.backends.cudnn.allow_tf32 = plan.tf32.value
    torch.backends.cudnn.benchmark = plan.cudnn_benchmark.value
    if config.run.deterministic:
        set_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    limit_memory(device, config.batch.gpu_memory_fraction)
    try:
        yield
    finally:
        limit_memory(device, 1.0)
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
        ) = before[2:5]
        torch.use_deterministic_algorithms(before[5])
