"""One run, carried out by one worker or by several: what each of them does, and what the main one records."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from torch import nn

from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import inventory, secret_values
from orchestrator.plan.planning import plan
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.record.log import Log
from orchestrator.record.monitor import Monitor
from orchestrator.redaction import mask
from orchestrator.train.checkpoint.snapshots import SnapshotTarget
from orchestrator.train.heartbeat import Heartbeat
from orchestrator.train.loop import Loop, LoopHooks, Outcome, Training
from orchestrator.train.parts.profiling import profiling
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.placement import PlacementDecision, decide_placement
from orchestrator.train.strategies.shares import assign_shares
from orchestrator.train.worker.batch_probe import find_batch
from orchestrator.train.worker.build import WorkerContext, build_training, torch_settings
from orchestrator.train.worker.resume import PastFailure, ResumeFrom
from orchestrator.train.worker.run_dir import (
    PreparedRun,
    earlier_global_batch,
    read_earlier_plan,
    read_last_expert_loads,
    write_config_and_plan,
    write_summary,
)
from orchestrator.types import VERSION, Choice


@dataclass(frozen=True)
class Supervision:
    """How the driver supervises a worker."""

    stop_requested: Callable[[], bool] = lambda: False
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    snapshots: SnapshotTarget | None = None
    """Where an expert host writes its snapshots; other workers take none."""


def run_worker(
    prepared: PreparedRun,
    world: World,
    run_dir: Path,
    log: Log,
    supervision: Supervision,
    resume: ResumeFrom | None = None,
) -> tuple[Outcome, nn.Module]:
    """Carry out one worker's part of a run. Returns how it ended, and the trained model."""
    with WorkerRun(prepared, world, run_dir, log, supervision, resume) as run:
        outcome = None
        while outcome is None:
            outcome = run.advance(sys.maxsize)
        return outcome, run.loop.stepper.strategy.model


class WorkerRun:
    """One worker's part of a run, in segments of steps: from the plan to the end, or until it is aborted."""

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
        self._begun = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # closes what is open already if a later part fails
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        opened_at, resume, log = time.time(), self._resume, self.log
        config = self.prepared.resolved.config
        stack.enter_context(torch_settings(config, self.prepared.plan, self.world.device))
        known: dict[str, Any] = {}
        if config.checkpoint.resume == "auto" or resume is not None:
            # The main worker reads for all: on a network drive they may not see the same file.
            known = self.world.broadcast_value(
                "plan", read_earlier_plan(self.run_dir) if self.world.is_main else None
            )
        prepared = with_measured_batch(self.prepared, self.world, known, log)
        hosting = self._hosting(prepared, known)
        known |= hosting.measured(config.parallel.placement) if hosting else {}
        if prepared.plan.data_ranks < self.world.size:
            self.world, speeds = self.world.with_data_on_main(), {}
        else:
            self.world, speeds = assign_shares(config, prepared.plan, self.world, known)
        if self.world.is_main:
            write_config_and_plan(
                prepared,
                self.run_dir,
                {"device_speeds": speeds} | (hosting.measured(config.parallel.placement) if hosting else {}),
            )
        self.prepared = prepared = _halved(prepared, resume.halvings if resume else 0)
        training = build_training(
            WorkerContext(prepared, self.world, self.run_dir, log),
            hosting.host_of if hosting else None,
            resume,
            self._supervision.snapshots,
        )
        # The step goes on counting once the loop runs: these are the values that the worker resumed with.
        after_step: list[Callable[[int], None]] = []
        if resume is not None and resume.failure is not None:
            after_step.append(_record_recovery(resume.failure, training, opened_at))
        log.write("start", **_start_fields(prepared, training))
        if hosting is not None:
            log.write("placement", step=training.progress.step, **hosting.event(prepared.facts))
        # The stack closes in reverse order: the loop, its observers, then the parts that it trains with.
        stack.callback(training.close)
        self.loop = Loop(training, self._hooks(stack, after_step))
        stack.callback(self.loop.close)
        self._begun = perf_counter()

    def _hooks(self, stack: ExitStack, after_step: list[Callable[[int], None]]) -> LoopHooks:
        """Start the observers of the loop. The profiler must not start before the model is built."""
        config, monitor = self.prepared.resolved.config, None
        if config.watch.monitor_gpu and self.world.is_main:
            monitor = stack.enter_context(_monitored(self.prepared, self.world, self.log))
        if config.watch.profile and self.world.is_main:
            after_step.append(stack.enter_context(profiling(self.run_dir, self.world.device)))

        def call_all(step: int) -> None:
            for call in after_step:
                call(step)

        return LoopHooks(self._supervision.stop_requested, call_all, monitor, self._supervision.heartbeat)

    def _hosting(self, prepared: PreparedRun, known: dict[str, Any]) -> PlacementDecision | None:
        if prepared.plan.strategy.value != "expert_parallel" or self.world.size == 1:
            return None
        seen = read_last_expert_loads(self.run_dir) if self.world.is_main and known else None
        loads = self.world.broadcast_value("loads", seen) or []
        return decide_placement(
            prepared.resolved.config, prepared.plan, prepared.facts, self.world, known, loads
        )

    def advance(self, steps: int, keep: bool = False) -> Outcome | None:
        """Train for so many steps, or to the end: then how it ended. A failure is for the caller to record: it may be mended. A segment
        that is to ``keep`` where it ends takes a copy of the state there."""
        loop, log = self.loop, self.log
        outcome = loop.advance(steps, keep)
        if outcome is None:
            return None
        if (
            loop.monitor is not None and self.prepared.resolved.config.watch.gpu_log_interval
        ):  # a short run has one reading too
            log.write("monitor", step=loop.progress.step, **loop.monitor())
        self._stack.close()
        seconds = perf_counter() - self._begun
        log.write(
            "end",
            status=outcome.status,
            reason=outcome.reason,
            steps=loop.progress.step,
            seconds=seconds,
            memory=loop.peak_memory(),
        )
        return outcome


def _halved(prepared: PreparedRun, halvings: int) -> PreparedRun:
    """The same global batch in smaller portions. The plan that is kept has the whole ones."""
    if not halvings:
        return prepared
    size = max(1, -(-prepared.plan.batch_size.value // 2**halvings))
    return replace(
        prepared, plan=replace(prepared.plan, batch_size=Choice(size, "a worker ran out of memory with more"))
    )


def record_failure(run_dir: Path, error: BaseException, seconds: float, log: EventLog | None = None) -> None:
    """The last words of a run that failed, and its report. What goes wrong here must not hide the error at hand: a full
    disk may be why we are here."""
    from orchestrator.report.run.page import draw_report

    secrets = secret_values()
    message = mask(
        str(error) or type(error).__name__, secrets
    )  # before it is cut: half a secret would not be known for one
    with suppress(Exception):
        own = log or EventLog(run_dir / "events.jsonl", secrets=secrets)
        steps = of_kind(read_events(run_dir / "events.jsonl"), "step")
        last = steps[-1]["step"] if steps else 0
        own.write(
            "failure", kind=type(error).__name__, message=message[:2000], rank=None, step=last, final=True
        )
        own.write("end", status="failed", reason=message.splitlines()[0][:200], steps=last, seconds=seconds)
        own.close()
        write_summary(run_dir)
        draw_report(run_dir)


def _record_recovery(failure: PastFailure, training: Training, opened_at: float) -> Callable[[int], None]:
    """Return a hook that writes a ``recovery`` event after the first step of a restarted run.

    The event needs three times of the worker: when it was opened (``opened_at``), when its state was restored
    (now), and when its first step was done (the hook's first call)."""
    restored_at = time.time()
    resumed_step = training.progress.step
    written = False

    def record(_: int) -> None:
        nonlocal written
        if written:
            return
        written = True
        training.log.write(
            "recovery",
            attempt=failure.attempt,
            reason=failure.reason,
            workers_before=failure.workers_before,
            workers=training.stepper.world.size,
            step=resumed_step,
            lost_steps=max(0, failure.last_step - resumed_step),
            detect_seconds=failure.detected_at - failure.failed_at,
            source="disk",
            regroup_seconds=opened_at - failure.detected_at,
            restore_seconds=restored_at - opened_at,
            total_seconds=time.time() - failure.failed_at,
        )

    return record


def _start_fields(prepared: PreparedRun, training: Training) -> dict[str, Any]:
    chosen, world = prepared.plan, training.stepper.world
    several = {"backend": chosen.backend.value, "sharding": chosen.sharding.value} if world.size > 1 else {}
    return {
        "version": VERSION,
        "task": prepared.resolved.config.task,
        "strategy": chosen.strategy.value,
        "workers": world.size,
        "device": str(world.device) if chosen.strategy.value == "single" else chosen.device.value,
        "precision": chosen.precision.value,
        "global_batch_size": chosen.global_batch_size.value,
        "parameters": prepared.facts.parameters,
        "unit": prepared.facts.unit,
        "total_steps": training.cadence.total_steps,
        "step": training.progress.step,
        **several,
        **({"gate": chosen.gate.value} if chosen.strategy.value == "expert_parallel" else {}),
        **({"shares": list(world.shares)} if world.shares else {}),
    }


def with_measured_batch(prepared: PreparedRun, world: World, known: dict[str, Any], log: Log) -> PreparedRun:
    """``--batch-size auto``: measure, or take what was measured when the run was first started."""
    config = prepared.resolved.config
    if config.batch.batch_size != "auto" or config.run.debug:
        return prepared
    if prepared.plan.sharding.value != "none":
        raise UserError(
            "--batch-size auto measures whole models, and --sharding cuts them up; leave it out (the plan estimates one), or give a number"
        )
    measured, reason = known.get("batch_size"), "measured when the run was first started"
    if measured is None:
        log.write("notice", message="measuring the batch size ...")
        found = find_batch(config, prepared.plan, prepared.task, world, prepared.facts)
        measured, reason = found.batch_size, found.reason
    kept = earlier_global_batch(config, known)
    again = plan(
        config,
        prepared.inventory,
        prepared.facts,
        {"batch_size": measured} | kept,
        prepared.cluster,
        prepared.in_cluster,
    )
    return replace(prepared, plan=replace(again, batch_size=Choice(measured, reason)))


@contextmanager
def _monitored(prepared: PreparedRun, world: World, log: Log) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields what gives the newest reading. The monitor warns from its own thread, and the log belongs to this one: its
    warnings are written when a reading is asked for."""
    device = world.device
    found = prepared.inventory if world.size == 1 else inventory()  # the plan's may be of another node
    gpus = [
        gpu for gpu in found.gpus if device.type == "cuda" and (world.size > 1 or gpu.index == device.index)
    ]
    heard: deque[str] = deque()
    monitor = Monitor(tuple(gpu.uuid or gpu.index for gpu in gpus), on_warning=heard.append)

    def reading() -> dict[str, Any]:
        while heard:
            log.write("warning", kind="memory", message=heard.popleft())
        return monitor.event_fields()

    with monitor:
        yield reading
