"""One run, carried out by one worker or by several: what each of them does, and what the main one records."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import inventory, secret_values
from orchestrator.plan.planning import plan
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.record.log import Log
from orchestrator.record.monitor import Monitor
from orchestrator.redaction import mask
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshots import Copies, Outbox, Snapshots
from orchestrator.train.heartbeat import Heartbeat
from orchestrator.train.loop import Loop, Outcome
from orchestrator.train.parts.profiling import profiling
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.placement import Hosting, decide_hosting
from orchestrator.train.strategies.shares import with_shares
from orchestrator.train.worker.batch_probe import find_batch
from orchestrator.train.worker.build import Parts, build_loop, machine_settings
from orchestrator.train.worker.run_dir import (
    Prepared,
    conclude,
    kept_batch,
    last_loads,
    planned_before,
    write_intentions,
)
from orchestrator.types import VERSION, Choice


@dataclass(frozen=True)
class Restart:
    """What a worker is told of the failure that it was started after. Times are unix seconds."""

    attempt: int
    reason: str
    failed_at: float
    detected_at: float
    workers_before: int
    last_step: int
    halvings: int = 0
    """How often the micro-batch was halved because a worker ran out of memory."""


@dataclass(frozen=True)
class Live:
    """What a host that can be helped while it lives has beside its loop, and where it is to begin."""

    pulse: Heartbeat
    outbox: Outbox
    rooms: PinnedBuffers
    generation: int
    again: bool = False
    """Whether the run has begun before."""
    halvings: int = 0
    copies: Copies = ()
    """Of all hosts' state; where there are none, a run that begins again reads its newest checkpoint."""


def work(
    prepared: Prepared,
    world: World,
    run_dir: Path,
    log: Log,
    asked: Callable[[], bool],
    restart: Restart | None = None,
) -> tuple[Outcome, Parts]:
    """One worker's part of a run, from the plan to the end. ``asked`` says whether someone wants it to stop."""
    with WorkerRun(prepared, world, run_dir, log, asked, restart) as stint:
        outcome = None
        while outcome is None:
            outcome = stint.advance(sys.maxsize)
        return outcome, stint.parts


class WorkerRun:
    """One worker's part of a run, in segments of steps: from the plan to the end, or to where it is broken off."""

    loop: Loop
    parts: Parts

    def __init__(
        self,
        prepared: Prepared,
        world: World,
        run_dir: Path,
        log: Log,
        asked: Callable[[], bool],
        restart: Restart | None = None,
        live: Live | None = None,
    ) -> None:
        self.prepared, self.world, self.run_dir, self.log = prepared, world, run_dir, log
        self._asked, self._restart, self._live = asked, restart, live
        self._stack, self._begun = ExitStack(), 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # whatever was opened is closed if the rest fails
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        begun, restart, live, log = time.time(), self._restart, self._live, self.log
        again = restart is not None or (live is not None and live.again)
        config = self.prepared.resolved.config
        stack.enter_context(machine_settings(config, self.prepared.plan, self.world.device))
        known: dict[str, Any] = {}
        if (
            config.checkpoint.resume == "auto" or again
        ):  # one reads for all: over a network drive they may not see the same
            known = self.world.broadcast_value(
                "plan", planned_before(self.run_dir) if self.world.is_main else None
            )
        prepared = with_measured_batch(self.prepared, self.world, known, log)
        hosting = self._hosting(prepared, known)
        known |= hosting.measured(config.parallel.placement) if hosting else {}
        if prepared.plan.data_ranks < self.world.size:
            self.world, speeds = self.world.with_data_on_main(), {}
        else:
            self.world, speeds = with_shares(config, prepared.plan, self.world, known)
        if self.world.is_main:
            write_intentions(
                prepared,
                self.run_dir,
                {"device_speeds": speeds} | (hosting.measured(config.parallel.placement) if hosting else {}),
            )
        self.prepared = prepared = _halved(
            prepared, max(restart.halvings if restart else 0, live.halvings if live else 0)
        )
        host_of = hosting.host_of if hosting else None
        self.loop, self.parts = build_loop(
            config,
            prepared.plan,
            prepared.task,
            self.world,
            self.run_dir,
            log,
            again,
            host_of,
            live.copies if live else (),
        )
        self.loop.stopping.asked = self._asked
        if live is not None:
            self._take_copies(live)
        if restart is not None:
            self.loop.after_step = _tells_recovery(restart, self.loop, log, begun)
        log.write("start", **_start_fields(prepared, self.loop))
        if hosting is not None:
            log.write("placement", step=self.loop.progress.step, **hosting.event(prepared.facts))
        self._watch(stack)
        self._begun = perf_counter()

    def _take_copies(self, live: Live) -> None:
        loop, parts = self.loop, self.parts
        loop.pulse = live.pulse
        every = self.prepared.resolved.config.checkpoint.snapshot_every
        taken = parts.model, parts.learner.optimizer, parts.precision
        loop.snapshots = Snapshots(every, live.generation, *taken, self.world, live.outbox, live.rooms)

    def _hosting(self, prepared: Prepared, known: dict[str, Any]) -> Hosting | None:
        if prepared.plan.strategy.value != "expert_parallel" or self.world.size == 1:
            return None
        seen = last_loads(self.run_dir) if self.world.is_main and known else None
        loads = self.world.broadcast_value("loads", seen) or []
        return decide_hosting(
            prepared.resolved.config, prepared.plan, prepared.facts, self.world, known, loads
        )

    def _watch(self, stack: ExitStack) -> None:
        """Those who watch the loop from beside it."""
        loop, config = self.loop, self.prepared.resolved.config
        stack.callback(loop.close)
        if config.watch.monitor_gpu and self.world.is_main:
            loop.monitor = stack.enter_context(_monitored(self.prepared, self.world, self.log))
        if config.watch.profile and self.world.is_main:
            loop.after_step = _both(
                loop.after_step, stack.enter_context(profiling(self.run_dir, self.world.device))
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


def _halved(prepared: Prepared, halvings: int) -> Prepared:
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
        conclude(run_dir)
        draw_report(run_dir)


def _tells_recovery(restart: Restart, loop: Loop, log: Log, begun: float) -> Callable[[int], None]:
    """After the first step of a restarted run: what the failure cost."""
    restored, resumed, told = time.time(), loop.progress.step, False

    def tell(_: int) -> None:
        nonlocal told
        if not told:
            log.write(
                "recovery",
                attempt=restart.attempt,
                reason=restart.reason,
                workers_before=restart.workers_before,
                workers=loop.stepper.world.size,
                step=resumed,
                lost_steps=max(0, restart.last_step - resumed),
                detect_seconds=restart.detected_at - restart.failed_at,
                source="disk",
                regroup_seconds=begun - restart.detected_at,
                restore_seconds=restored - begun,
                total_seconds=time.time() - restart.failed_at,
            )
            told = True

    return tell


def _both(first: Callable[[int], None], second: Callable[[int], None]) -> Callable[[int], None]:
    def call(step: int) -> None:
        first(step)
        second(step)

    return call


def _start_fields(prepared: Prepared, loop: Loop) -> dict[str, Any]:
    chosen, world = prepared.plan, loop.stepper.world
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
        "total_steps": loop.cadence.total_steps,
        "step": loop.progress.step,
        **several,
        **({"gate": chosen.gate.value} if chosen.strategy.value == "expert_parallel" else {}),
        **({"shares": list(world.shares)} if world.shares else {}),
    }


def with_measured_batch(prepared: Prepared, world: World, known: dict[str, Any], log: Log) -> Prepared:
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
    kept = kept_batch(config, known)
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
def _monitored(prepared: Prepared, world: World, log: Log) -> Iterator[Callable[[], dict[str, Any]]]:
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
