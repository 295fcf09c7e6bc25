"""One worker's part of a run: completes the plan, builds the training, and runs the loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from torch import nn

from experts.model import structure_of
from orchestrator.checkpoint.saved_experts import OtherExperts, SavedExperts
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.log import Log
from orchestrator.record.files.reading import last_recorded_step
from orchestrator.record.summary.index import read_fold, save_fold
from orchestrator.redaction import Secrets, mask
from orchestrator.run.plan_file import (
    read_earlier_plan,
    read_last_expert_loads,
    write_config_and_plan,
)
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.run.run_dir import write_summary
from orchestrator.train.checkpoint.snapshots import SnapshotTarget
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.requests import Requests
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop, Outcome
from orchestrator.train.loop.training import LoopHooks, Training
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.shares import assign_shares
from orchestrator.train.worker.batch_probe import JointProbe, with_measured_batch
from orchestrator.train.worker.build import OpenStore, WorkerContext, build_training
from orchestrator.train.worker.manifest import record_manifest
from orchestrator.train.worker.observers import monitor_readings, profiling
from orchestrator.train.worker.placed_experts import (
    PlacedExperts,
    facts_with_experts,
    place_experts,
    placement_event,
)
from orchestrator.train.worker.resume import ResumeFrom, StartPoint, saved_experts_to_start_with
from orchestrator.train.worker.shown_model import ShownModel
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import VERSION, Choice, first_line

_MAX_MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True)
class Supervision:
    """How the driver supervises a worker."""

    take_requests: Callable[[], Requests] = Requests
    """Returns the requests of the user and of callbacks since the last call."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    snapshots: SnapshotTarget | None = None
    """Where a host writes its snapshots; other workers take none."""
    callbacks: CallbackRunner | None = None
    """Callbacks that look at the model in this process, if it is that of the main worker."""
    open_store: OpenStore = CheckpointStore
    """Opens the checkpoints of the run: a folder that all workers see, or files of each node."""


def run_worker(
    prepared: PreparedRun,
    world: World,
    run_dir: Path,
    log: Log,
    supervision: Supervision,
    resume: ResumeFrom | None = None,
) -> tuple[Outcome, nn.Module]:
    """Carry out a run in this process. Return its outcome and the trained model.

    Its weights are those that the last validation was of: with ``--evaluate-ema`` the average."""
    settings = torch_settings(prepared.resolved.config, prepared.plan, world.device)
    with settings, WorkerRun(prepared, world, run_dir, log, supervision, resume) as run:
        outcome = None
        while outcome is None:
            outcome = run.run_steps(sys.maxsize)
        stepper = run.loop.stepper
        average = stepper.optimizer.average
        if average is not None and average.evaluated:
            average.replace_weights()
        if stepper.copies is not None:
            stepper.copies.drop()
        return outcome, stepper.strategy.model


class WorkerRun:
    """One worker's part of a run in segments of steps, to the end or until it is aborted.

    The caller has entered ``torch_settings``, before it formed the world: NCCL is deterministic only
    if torch was so when the group was formed."""

    loop: Loop

    def __init__(
        self,
        prepared: PreparedRun,
        world: World,
        run_dir: Path,
        log: Log,
        supervision: Supervision,
        resume: ResumeFrom | None = None,
    ) -> None:
        self.prepared = prepared
        self.world = world
        self.run_dir = run_dir
        self.log = log
        self._supervision = supervision
        self._resume = resume
        self._stack = ExitStack()
        self._began_s = 0.0

    def __enter__(self) -> Self:
        opened_at = time.time()
        with ExitStack() as stack:  # closes what is open already if a later part fails
            saved = self._saved_experts()
            experts = self._complete_plan(saved)
            supervision = self._supervision
            worker = WorkerContext(
                self.prepared,
                self.world,
                self.run_dir,
                self.log,
                supervision.heartbeat,
                supervision.open_store,
            )
            try:
                training = build_training(worker, experts, self._resume, supervision.snapshots)
            except OtherExperts as other:
                # The newest checkpoint was damaged, and an older one with other experts took its place.
                saved = other.saved
                experts = place_experts(self.prepared, self.world, {}, saved, [], "other experts")
                training = build_training(worker, experts, self._resume, supervision.snapshots)
            self._record_start(training, experts, saved, time.time() - opened_at)
            # The stack closes in reverse order: the loop, its observers, then the parts it trains with.
            stack.callback(training.close)
            self.loop = Loop(training, self._start_observers(stack, training.stepper.strategy))
            stack.callback(self.loop.close)
            self._began_s = perf_counter()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run_steps(self, num_steps: int, take_snapshot: bool = False) -> Outcome | None:
        """Train for a segment of ``num_steps``. Return the outcome if the run has ended, else None.

        A segment leaves a snapshot of its last step if ``take_snapshot``. A failure is raised
        and not recorded: the driver may recover from it."""
        loop = self.loop
        outcome = loop.run_steps(num_steps, take_snapshot)
        if outcome is None:
            return None
        if self.prepared.resolved.config.watch.gpu_log_interval:
            loop.record_monitor()  # a run shorter than the interval has one reading too
        self._stack.close()
        if self._supervision.callbacks is not None:
            self._supervision.callbacks.report_repeated_errors()
        self.log.write(
            kinds.End(
                status=outcome.status,
                reason=outcome.reason,
                steps=loop.progress.step,
                seconds=perf_counter() - self._began_s,
                memory=loop.memory.run_record(),
            )
        )
        return outcome

    def _record_start(
        self, training: Training, experts: PlacedExperts, saved: SavedExperts | None, build_seconds: float
    ) -> None:
        """Record the start, the settings that have changed, and where the experts are."""
        # From the seconds the driver learns when the workers of a restarted run had formed their group.
        start = _start_event(self.prepared, training, build_seconds)
        if self.prepared.resolved.config.run.reproducible:
            step = training.progress.step
            record_manifest(self.prepared, self.world, training.feed, step, self.run_dir, self.log)
        self.log.write(start)
        step = training.progress.step
        # Workers that restart after a failure change nothing.
        if self.prepared.changes and self._resume is None:
            changes = tuple(kinds.ChangedSetting(**vars(change)) for change in self.prepared.changes)
            self.log.write(kinds.Settings(step=step, changes=changes))
        if experts.decision is not None:
            facts = facts_with_experts(self.prepared.facts, saved)
            layers = structure_of(training.stepper.strategy.model)
            self.log.write(placement_event(experts.decision, facts, layers, step))

    def _saved_experts(self) -> SavedExperts | None:
        """Return the experts of the state to start from."""
        store = self._supervision.open_store(self.run_dir / "checkpoints", repair=False)
        start = StartPoint(store, self.world, self.log, self._supervision.heartbeat.beat)
        return saved_experts_to_start_with(self.prepared.resolved.config, start, self._resume)

    def _complete_plan(self, saved: SavedExperts | None) -> PlacedExperts:
        """Complete the plan with what only the workers can measure, and write it to the run folder.

        Sets ``prepared`` (batch size) and ``world`` (shares of the batch). Returns the experts with
        their placement."""
        config = self.prepared.resolved.config
        known: dict[str, Any] = {}
        if config.checkpoint.resume == "auto" or self._resume is not None:
            # The main worker reads for all: on a network drive they may not see the same file.
            earlier_plan = read_earlier_plan(self.run_dir) if self.world.is_main else None
            known = self.world.broadcast_value("plan", earlier_plan)
        prepared = self.prepared
        experts = place_experts(prepared, self.world, known, saved, self._last_loads(prepared, known))
        halvings = self._resume.halvings if self._resume else 0
        joint = JointProbe(experts, self._supervision.heartbeat, halvings)
        # Before the batch is measured: a fast worker has more samples in a step than the others.
        self.world, device_speeds = assign_shares(config, prepared.plan, self.world, known)
        prepared = with_measured_batch(prepared, self.world, known, self.log, joint)
        placement_fields: dict[str, Any] = {}
        if experts.decision is not None:
            placement_fields = experts.decision.saved_fields(config.parallel.placement)
        # A start that ran out of memory while it measured has measured again, below that size.
        has_measured = prepared is not self.prepared and "batch_size" not in known
        included = halvings if has_measured else min(halvings, known.get("halvings", 0))
        if self.world.is_main:
            measured = {"device_speeds": device_speeds, "halvings": included} | placement_fields
            write_config_and_plan(prepared, self.run_dir, measured)
            keep_files: Callable[[Path], None] | None = getattr(prepared.task, "keep_files", None)
            if keep_files is not None:
                keep_files(self.run_dir)
        # After the plan is written: a later start of the run begins with whole micro-batches again.
        self.prepared = _with_halved_batch(prepared, halvings - included)
        return experts

    def _last_loads(self, prepared: PreparedRun, known: dict[str, Any]) -> list[dict[str, float]]:
        """Return the tokens per expert and layer as last seen, by the experts' ids."""
        if not prepared.plan.strategy_facts.divides_experts or self.world.size == 1:
            return []
        # A new run has no record yet: an old one in the same folder is not its own.
        last_loads = None
        if self.world.is_main and known:
            last_loads = read_last_expert_loads(self.run_dir)
        return self.world.broadcast_value("loads", last_loads) or []

    def _start_observers(self, stack: ExitStack, strategy: Strategy) -> LoopHooks:
        """Start the monitor and the profiler, and show the model to callbacks.

        The profiler must not start before the model is built."""
        hooks = LoopHooks(take_requests=self._supervision.take_requests)
        watch = self.prepared.resolved.config.watch
        if watch.monitor_gpu and self.world.is_main:
            monitor = stack.enter_context(monitor_readings(self.prepared, self.world, self.log))
            hooks = replace(hooks, monitor=monitor)
        if watch.profile and self.world.is_main:
            after_step = stack.enter_context(profiling(self.run_dir, self.world.device))
            hooks = replace(hooks, after_step=after_step)
        callbacks = self._supervision.callbacks
        if callbacks is not None and callbacks.sees_model and self.world.is_main:
            hooks = replace(hooks, show_model=ShownModel(callbacks, strategy, self.world.size))
        return hooks


def _with_halved_batch(prepared: PreparedRun, halvings: int) -> PreparedRun:
    """Return the run with smaller micro-batches, as a worker ran out of memory.

    The global batch stays the same."""
    if not halvings:
        return prepared
    size = max(1, -(-prepared.plan.batch_size.value // 2**halvings))
    batch_size = Choice(size, "a worker ran out of memory with more")
    return replace(prepared, plan=replace(prepared.plan, batch_size=batch_size))


def _start_event(prepared: PreparedRun, training: Training, build_seconds: float) -> kinds.Start:
    plan = prepared.plan
    world = training.stepper.world
    strategy = plan.strategy_facts
    is_parallel = world.size > 1
    return kinds.Start(
        version=VERSION,
        task=prepared.resolved.config.task,
        strategy=strategy.name,
        workers=world.size,
        device=str(world.device) if strategy.in_process else plan.device.value,
        precision=plan.precision.value,
        global_batch_size=plan.global_batch_size.value,
        parameters=prepared.facts.parameters,
        unit=prepared.facts.unit,
        total_steps=training.cadence.total_steps,
        step=training.progress.step,
        best_by=f"{training.cadence.metric}:{training.cadence.mode}",
        build_seconds=build_seconds,
        backend=plan.backend.value if is_parallel else None,
        sharding=plan.sharding.value if is_parallel else None,
        gate=plan.gate.value if strategy.divides_experts else None,
        shares=tuple(world.shares or ()),
    )


def count_starts(run_dir: Path) -> int:
    """Return the number of starts that the record of a run has."""
    path = run_dir / "events.jsonl"
    # A record without an index is read as a whole once, not again at the end of the run.
    save_fold(path)
    return read_fold(path).totals.num_starts


def _driver_log(path: Path, callbacks: CallbackRunner | None, secrets: Secrets) -> DriverLog:
    """Return a log of the driver that callbacks follow, and write to."""
    log = DriverLog(path, [callbacks] if callbacks else [], secrets=secrets)
    if callbacks is not None:
        callbacks.write_to(log.write)
    return log


def record_failure(
    run_dir: Path,
    error: BaseException,
    seconds: float,
    starts_before: int,
    log: EventLog | None = None,
    callbacks: CallbackRunner | None = None,
) -> None:
    """Record that a run failed, and write its summary and report.

    ``starts_before`` is the number of starts that the record had before this one. A resume that
    fails before its own start leaves the earlier outcome as it was. ``log`` is that of a run in one
    process; without it, the driver's own is opened, and ``callbacks`` follow it.

    An error in here must not hide the failure itself: a full disk may be the cause of both."""
    from orchestrator.report.run.page import draw_report

    secrets = secret_values()
    # Masked before it is cut: half a secret would not be recognised.
    message = mask(str(error) or type(error).__name__, secrets)
    with suppress(Exception):
        path = run_dir / "events.jsonl"
        event_log = log or _driver_log(path, callbacks, secrets)
        if starts_before and count_starts(run_dir) == starts_before:
            text = f"a resume failed before its first step: {first_line(message)}"
            event_log.write(kinds.Warned(kind="resume", message=text))
            event_log.close()
            return
        last_step = last_recorded_step(path)
        event_log.write(
            kinds.Failure(
                kind=type(error).__name__,
                message=message[:_MAX_MESSAGE_CHARACTERS],
                rank=None,
                step=last_step,
                final=True,
            )
        )
        event_log.write(
            kinds.End(
                status="failed",
                reason=first_line(message),
                steps=last_step,
                seconds=seconds,
            )
        )
        event_log.close()
        write_summary(run_dir)
        draw_report(run_dir, at_end=True)
