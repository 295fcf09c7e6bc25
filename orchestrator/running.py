"""One run in this process: its folder, its record, its signals, and how it ended."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.config.reader import Resolved, to_json, write_file
from orchestrator.config.settings import Config, flat_names
from orchestrator.errors import UserError
from orchestrator.plan.hardware import Inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.record.monitor import Monitor
from orchestrator.record.screen import Screen
from orchestrator.record.summary import summarise, write_json
from orchestrator.record.trackers import TrackerThread
from orchestrator.types import VERSION, Choice, count_text

if TYPE_CHECKING:
    from orchestrator.plan.estimate import ModelFacts
    from orchestrator.tasks.task import Task
    from orchestrator.train.loop import Loop, Outcome


@dataclass(frozen=True)
class Prepared:
    """A run before it starts: what was asked, what was found, what was chosen."""

    resolved: Resolved
    task: Task
    inventory: Inventory
    facts: ModelFacts
    plan: Plan


def train(loop: Loop, prepared: Prepared, run_dir: Path, log: EventLog, stack: ExitStack) -> Outcome:
    """Run the loop; whatever happens, the record says how it ended."""
    config, begun = prepared.resolved.config, perf_counter()
    log.write("start", **_start_fields(prepared, loop.progress.step, loop.cadence.total_steps))
    loop.stopping = stack.enter_context(_interruptible())
    if config.watch.monitor_gpu:
        loop.monitor = stack.enter_context(_monitored(prepared, log))
    if config.watch.profile:
        from orchestrator.train.profiling import profiling

        loop.after_step = stack.enter_context(profiling(run_dir, loop.stepper.world.device))
    try:
        outcome = loop.run()
    except BaseException as error:
        message = str(error) or type(error).__name__
        with suppress(Exception):  # a full disk may be why we are here; the error that counts is the one at hand
            log.write("failure", kind=type(error).__name__, message=message[:2000], final=True)
            _write_end(loop, log, "failed", message.splitlines()[0][:200], begun)
            log.close()
            conclude(run_dir)
            from orchestrator.report.page import draw_report

            draw_report(run_dir)
        raise
    finally:
        loop.close()
    if loop.monitor is not None and config.watch.gpu_log_interval:  # a short run has one reading too
        log.write("monitor", step=loop.progress.step, **loop.monitor())
    _write_end(loop, log, outcome.status, outcome.reason, begun)
    return outcome


def _write_end(loop: Loop, log: EventLog, status: str, reason: str, begun: float) -> None:
    seconds = perf_counter() - begun
    log.write("end", status=status, reason=reason, steps=loop.progress.step, seconds=seconds, memory=loop.peak_memory())


def outcome_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """How a run ended, in two lines."""

    def shown(values: dict[str, Any]) -> str:
        return ", ".join(f"{name} {float(value):.4f}" for name, value in values.items() if name != "step")

    parts = [f"{summary['steps']} steps ({summary['reason']})"]
    if summary["validation"]:
        parts.append(f"validation {shown(summary['validation'])}")
        best = summary["best"]
        if best and best["step"] != summary["steps"]:
            parts.append(f"best at step {best['step']}: {shown(best)}")
    elif summary["train_loss"] is not None:
        parts.append(f"training loss {float(summary['train_loss']):.4f}")
    rate, units = summary["samples_per_second"], summary["units_per_second"]
    if rate:
        parts.append(f"{rate:,.0f} samples/s" + (f" ({units:,.0f} {summary['unit']}/s)" if units != rate else ""))
    return [f"{summary['status']}: {', '.join(parts)}", f"report: {run_dir / 'report.html'}"]


def conclude(run_dir: Path) -> dict[str, Any]:
    """Write ``summary.json`` from the events."""
    summary = summarise(read_events(run_dir / "events.jsonl"))
    write_json(run_dir / "summary.json", summary)
    return summary


def _start_fields(prepared: Prepared, step: int, total: int) -> dict[str, Any]:
    chosen = prepared.plan
    return {
        "version": VERSION,
        "task": prepared.resolved.config.task,
        "strategy": "single",
        "workers": 1,
        "device": chosen.device.value,
        "precision": chosen.precision.value,
        "global_batch_size": chosen.global_batch_size.value,
        "parameters": prepared.facts.parameters,
        "unit": prepared.facts.unit,
        "total_steps": total,
        "step": step,
    }


def banner_rows(prepared: Prepared, run_dir: Path) -> list[tuple[str, str]]:
    """The start-up banner: processes, strategy, precision, accumulation, devices."""
    chosen, facts = prepared.plan, prepared.facts
    experts = f", {facts.experts} experts in {facts.moe_layers} layers" if facts.experts else ""
    batch = f"{chosen.batch_size.value} × {chosen.accumulation_steps.value} accumulation × 1 worker = {chosen.global_batch_size.value}"
    return [
        ("task", f"{prepared.resolved.config.task} ({count_text(facts.parameters)} parameters{experts})"),
        ("data", f"{facts.samples} training and {facts.validation_samples} validation samples"),
        ("processes", "1 (strategy: single device)"),
        ("device", f"{chosen.device.value}: {chosen.device.reason}"),
        ("precision", f"{chosen.precision.value}: {chosen.precision.reason}"),
        ("batch", batch),
        ("steps", f"{chosen.total_steps.value}: {chosen.total_steps.reason}"),
        ("folder", str(run_dir)),
    ]


def with_measured_batch(prepared: Prepared, world: Any, run_dir: Path, screen: Screen) -> Prepared:
    """``--batch-size auto``: measure, or read what was measured when the run was first started."""
    from orchestrator.train.probing import find_batch, measured_before

    config = prepared.resolved.config
    if config.batch.batch_size != "auto" or config.run.debug:
        return prepared
    saved = run_dir / "plan.json"
    known: dict[str, int] = {}
    if config.checkpoint.resume == "auto" and saved.exists():
        with suppress(ValueError):  # a damaged plan is measured anew
            known = measured_before(json.loads(saved.read_text(encoding="utf-8")))
    reason = "measured when the run was first started"
    if not known:
        screen.note("measuring the batch size ...")
        found = find_batch(config, prepared.plan, prepared.task, world, prepared.facts)
        known, reason = {"batch_size": found.batch_size}, found.reason
    again = plan(config, prepared.inventory, prepared.facts, known)
    return replace(prepared, plan=replace(again, batch_size=Choice(known["batch_size"], reason)))


def write_intentions(prepared: Prepared, run_dir: Path) -> None:
    write_file(prepared.resolved, run_dir / "config.yaml")
    write_json(run_dir / "plan.json", plan_json(prepared))


def plan_json(prepared: Prepared) -> dict[str, Any]:
    """The plan with the settings and hardware it was made from."""
    values = to_json(prepared.resolved.config)
    settings = [
        {
            "name": f"{section}.{name}" if section else name,
            "value": values[section][name] if section else values[name],
            "origin": prepared.resolved.origin(name),
        }
        for name, section in flat_names().items()
    ]
    facts = {k: getattr(prepared.facts, k) for k in prepared.facts.__dataclass_fields__}
    return {**prepared.plan.to_json(), "settings": settings, "hardware": prepared.inventory.to_json(), "model": facts}


@contextmanager
def recording(prepared: Prepared, run_dir: Path, screen: Screen) -> Iterator[EventLog]:
    """The event log with all who read along."""
    config = prepared.resolved.config

    def warn(message: str) -> None:
        log.write("warning", kind="tracker", message=message)

    trackers = TrackerThread(config.watch.trackers, run_dir, run_dir.name, to_json(config), on_warning=warn)
    log = EventLog(run_dir / "events.jsonl", [screen, trackers])
    try:
        yield log
    finally:
        with suppress(ValueError):  # after a failure the log is closed already
            trackers.close()
        screen.close()
        log.close()


@contextmanager
def _monitored(prepared: Prepared, log: EventLog) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields what gives the newest reading. The monitor warns from its own thread, and the log belongs to this one: its
    warnings are written when a reading is asked for."""
    device = prepared.plan.device.value
    gpus = [gpu for gpu in prepared.inventory.gpus if device == f"cuda:{gpu.index}"]
    heard: deque[str] = deque()
    monitor = Monitor(tuple(gpu.uuid or gpu.index for gpu in gpus), on_warning=heard.append)

    def reading() -> dict[str, Any]:
        while heard:
            log.write("warning", kind="memory", message=heard.popleft())
        return monitor.event_fields()

    with monitor:
        yield reading


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask the loop to stop at the next step; a second SIGINT stops at once. In a thread other than the
    main one signals are not ours."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, _: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_run_dir(config: Config, name: str | None) -> Path:
    """The folder of the run, made and writable. A folder that holds a run already is continued only when asked for."""
    run_dir = config.run.run_dir or _named(config, name)
    if config.checkpoint.resume is None and of_kind(read_events(run_dir / "events.jsonl"), "start"):
        raise UserError(f"{run_dir} holds a run already; continue it with --resume auto, or choose another --run-dir or --name")
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        mark = run_dir / ".writable"
        mark.touch()
        mark.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the run folder {run_dir}: {error.strerror}; choose another with --run-dir") from None
    return run_dir


def _named(config: Config, name: str | None) -> Path:
    results = Path.cwd() / "results"
    if name:
        return results / name
    task = config.task.rpartition(":")[2].lower() if ":" in config.task else config.task
    if config.checkpoint.resume == "auto":
        stamped = re.compile(rf"{re.escape(task)}-\d{{8}}-\d{{6}}(-\d+)?")
        earlier = sorted(path.parent for path in results.glob("*/events.jsonl") if stamped.fullmatch(path.parent.name))
        if earlier:
            return earlier[-1]
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    free = (results / f"{task}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in free if not path.exists())
