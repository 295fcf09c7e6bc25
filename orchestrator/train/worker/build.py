"""Builds the training of one worker and restores the state it starts from."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from experts.model import mix
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.metric import Criterion, declared_metrics, find_criterion, missing_metric
from orchestrator.config.settings import Config
from orchestrator.data.cursor import CursorHooks
from orchestrator.errors import UserError
from orchestrator.plan.compute import with_memory_settings
from orchestrator.plan.planning import Plan
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Task
from orchestrator.tasks.user_code import user_code
from orchestrator.train.checkpoint.digests import Digests
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter, NoCheckpoints
from orchestrator.train.data.loading import LoaderOptions, seed_python_and_numpy
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.data.stream import StreamFeed
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.world import World
from orchestrator.train.loop.training import Cadence, Training
from orchestrator.train.optim.weight_average import drop_average
from orchestrator.train.worker.build_evolution import build_evolution
from orchestrator.train.worker.build_model import ModelParts, build_graphs, build_parts, build_stepper
from orchestrator.train.worker.placed_experts import ON_ONE_HOST, PlacedExperts
from orchestrator.train.worker.resume import (
    ResumeFrom,
    StartPoint,
    restore_checkpoint,
    restore_newest,
)

_DEBUG_EVALUATION_BATCHES = 2


class OpenStore(Protocol):
    """Opens the checkpoints of a run, as ``CheckpointStore`` does."""

    def __call__(self, folder: Path, *, keep: int = 3, repair: bool) -> CheckpointStore: ...


@dataclass(frozen=True)
class WorkerContext:
    """One worker of a run: its job, its world, and where it records."""

    prepared: PreparedRun
    world: World
    run_dir: Path
    log: Log
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    open_store: OpenStore = CheckpointStore


def build_training(
    worker: WorkerContext,
    experts: PlacedExperts = ON_ONE_HOST,
    resume: ResumeFrom | None = None,
    snapshots: SnapshotTarget | None = None,
) -> Training:
    """Build the model, the data and the optimizer, and restore the state that the run starts from.

    ``snapshots`` is the target of this host's snapshots. Raises ``OtherExperts`` if the state has other
    experts than ``experts``."""
    config = worker.prepared.resolved.config
    plan = worker.prepared.plan
    task = worker.prepared.task
    world = worker.world
    log = worker.log
    parts = build_parts(config, plan, task, world, log.write, experts)
    with ExitStack() as on_failure:
        if parts.compiled is not None:
            # After a failure the caller has no parts to close, and torch's settings are global.
            on_failure.callback(parts.compiled.close)
        feed = build_feed(config, plan, task, world)
        _connect(feed, worker)
        evaluation = build_evaluation(config, plan, task, world, parts, worker.heartbeat)
        if config.run.early_stopping_patience and evaluation is None:
            raise UserError("--early-stopping-patience needs validation data; the task has none")
        folder = worker.run_dir / "checkpoints"
        store = worker.open_store(folder, keep=config.checkpoint.keep, repair=world.is_main)
        progress = _restore(worker, parts, store, resume)
        parts.strategy.grid_exponent = progress.grid_exponent
        total_steps = _last_step(config, plan, feed, progress)
        if total_steps != plan.total_steps.value:
            message = f"the run now ends at step {total_steps}; the schedule follows"
            log.write(kinds.Warned(kind="schedule", message=message))
            parts.optimizer.reschedule(plan.warmup_steps.value, total_steps)
        # In lockstep all workers do passes of the same size, the mean; else each its own largest.
        micro_batch = feed.micro_batch if parts.strategy.lockstep else feed.largest_micro_batch
        stepper = build_stepper(config, world, parts, micro_batch, log.write, worker.heartbeat)
        stepper.graphs = build_graphs(config, plan, world, parts, log.write)
        state_bytes = with_memory_settings(config, worker.prepared.facts).expert_state_bytes
        snapshots_of_host = None
        if snapshots is not None:
            snapshots_of_host = Snapshots(parts.state, world, snapshots, progress.step)
        stretch = worker.prepared.stretch
        if stretch is not None:  # the schedule stays that of the whole run
            total_steps = stretch.last_step
        training = Training(
            stepper=stepper,
            feed=feed,
            cadence=_build_cadence(config, plan, total_steps, watched_metric(config, task)),
            progress=progress,
            log=log,
            checkpoints=(
                NoCheckpoints()
                if stretch is not None
                else CheckpointWriter(store, parts.state, world, log, worker.heartbeat.beat)
            ),
            heartbeat=worker.heartbeat,
            evaluation=evaluation,
            snapshots=snapshots_of_host,
            digests=_build_digests(worker, parts.state),
        )
        hosts = experts.decision.hosts if experts.decision is not None else ()
        evolution = build_evolution(training, plan, config, parts.evolution, hosts, state_bytes)
        on_failure.pop_all()
    return replace(training, evolution=evolution)


def _build_digests(worker: WorkerContext, state: TrainState) -> Digests | None:
    config = worker.prepared.resolved.config
    stretch = worker.prepared.stretch
    if not config.run.reproducible or (stretch is None and not config.watch.digest_every):
        return None
    steps = stretch.digest_steps if stretch is not None else None
    return Digests(state, worker.world, worker.log, config.watch.digest_every, steps)


def _connect(feed: Feed, worker: WorkerContext) -> None:
    """Let the data show its progress and its warnings."""

    def warn(message: str) -> None:
        worker.log.write(kinds.Warned(kind="data", message=message))

    if isinstance(feed, StreamFeed):
        feed.hooks = CursorHooks(worker.heartbeat.beat, warn)
    if feed.note is not None:
        warn(feed.note)


def _restore(
    worker: WorkerContext,
    parts: ModelParts,
    store: CheckpointStore,
    resume: ResumeFrom | None,
) -> Progress:
    """Restore the state that the run starts from. Return its progress."""
    config = worker.prepared.resolved.config
    # Model and data may have drawn random numbers. A resumed run restores its own generators.
    seed_python_and_numpy(mix(config.run.seed, "run"))
    start = StartPoint(store, worker.world, worker.log, worker.heartbeat.beat)
    if resume is not None and resume.snapshots is not None:
        progress = restore_newest(resume.snapshots, parts.state, start, resume.checkpoint_is_newer)
    else:
        progress = restore_checkpoint(config, parts.state, start, restarted=resume is not None)
    if parts.optimizer.average is None:
        drop_average(parts.optimizer.inner)
    has_new_metric = any(change.name == "early_stopping_metric" for change in worker.prepared.changes)
    if has_new_metric and resume is None:
        # The best result so far is a value of another metric: it does not compare.
        progress.best_step = None
        progress.best_value = None
        progress.best_loss = None
        progress.bad_evaluations = 0
    return progress


def build_feed(config: Config, plan: Plan, task: Task, world: World) -> Feed:
    """Return the training data as batches in the order of the run's seed."""
    with user_code("reading the training data"):
        data = task.train_data()
    return open_feed(
        data,
        world,
        global_batch=plan.global_batch_size.value,
        micro_batch=plan.batch_size.value,
        seed=config.run.seed,
        loader=replace(_loader_options(config, plan), shuffle_buffer=config.data.shuffle_buffer),
    )


def build_evaluation(
    config: Config,
    plan: Plan,
    task: Task,
    world: World,
    parts: ModelParts,
    heartbeat: Heartbeat | None = None,
) -> Evaluation | None:
    """Return the evaluation on the task's validation data, or None if it has none."""
    with user_code("reading the validation data"):
        data = task.validation_data() if hasattr(task, "validation_data") else None
    if data is None:
        return None
    size = plan.eval_batch_size.value
    feed = open_feed(
        data,
        world,
        global_batch=size * world.data_ranks,
        micro_batch=size,
        seed=None,
        loader=_loader_options(config, plan),
    )
    max_batches = _DEBUG_EVALUATION_BATCHES if config.run.debug else None
    evaluation = Evaluation(parts.strategy, feed, parts.precision, max_batches)
    metric = watched_metric(config, task).name
    if metric != "loss":
        check_has_metric(evaluation, metric, "--early-stopping-metric")
    if heartbeat is not None:
        evaluation.on_progress = heartbeat.beat
    return evaluation


def check_has_metric(evaluation: Evaluation, metric: str, flag: str) -> None:
    """Evaluate one batch: a wrong name should fail before the first epoch, not after it."""
    trial = replace(evaluation, max_batches=1, name="try")
    metrics = trial()["metrics"]
    if metric not in metrics:
        raise UserError(missing_metric(flag, metric, metrics))


def _loader_options(config: Config, plan: Plan) -> LoaderOptions:
    return LoaderOptions(
        plan.loader_workers.value,
        plan.prefetch.value,
        plan.data_on_device.value,
        skip_bad=config.data.skip_bad,
    )


def watched_metric(config: Config, task: Task) -> Criterion:
    """Return the metric of early stopping and the best checkpoint; UserError if its direction is unknown."""
    text = config.run.early_stopping_metric
    return find_criterion(text, declared_metrics(task), "--early-stopping-metric")


def _build_cadence(config: Config, plan: Plan, total_steps: int | None, watched: Criterion) -> Cadence:
    return Cadence(
        total_steps=total_steps,
        epochs=config.run.epochs,
        log_every=plan.log_every.value,
        evaluate_every=config.watch.evaluate_every,
        checkpoint_every=config.checkpoint.checkpoint_every,
        monitor_every=config.watch.gpu_log_interval if config.watch.monitor_gpu else 0,
        empty_cache_every=config.device.empty_cache_every,
        patience=config.run.early_stopping_patience,
        metric=watched.name,
        mode=watched.mode,
    )


def _last_step(config: Config, plan: Plan, feed: Feed, progress: Progress) -> int | None:
    """Return the step at which the run ends; None where only the end of the data ends an epoch.

    A resumed run counts from its progress: with another batch size than before, it does not end
    where the plan says."""
    if progress.step == 0 or config.run.debug:
        return plan.total_steps.value
    steps_in_epoch = feed.steps_from(progress.position)
    steps_per_epoch = feed.steps_from(0)
    if steps_in_epoch is None or steps_per_epoch is None:
        return config.run.max_steps
    later_epochs = max(0, config.run.epochs - progress.epoch - 1)
    remaining = steps_in_epoch + later_epochs * steps_per_epoch
    if progress.epoch >= config.run.epochs:
        remaining = 0
    last_step = progress.step + remaining
    return min(last_step, config.run.max_steps or last_step)
