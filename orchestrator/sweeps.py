"""A sweep from its beginning to its report: the folder, the ledger, the trials, the tables and pictures."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.settings import Config
from orchestrator.config.space import point_flags
from orchestrator.config.sweep import Sweep
from orchestrator.config.writer import changed_settings
from orchestrator.errors import Interrupted, OrchestratorError, ResourceError, TrainingFailed, UserError
from orchestrator.plan.inventory.hardware import results_folder, secret_values
from orchestrator.record.ledger import SETTINGS_NOT_KEPT, Ledger, SweepRecord, holds_sweep, read_sweep_record
from orchestrator.types import VERSION

if TYPE_CHECKING:
    from orchestrator.record.sweep_screen import SweepScreen
    from orchestrator.runtime.sweep.run import SweepDevices
    from orchestrator.train.worker.prepared_run import PreparedRun


def carry_out(
    sweep: Sweep, prepared: PreparedRun, ground: SweepDevices, before: SweepRecord | None, quiet: bool
) -> SweepRecord:
    """Make the trials that are not made yet, and draw the report."""
    from orchestrator.record.sweep_screen import SweepScreen
    from orchestrator.runtime.sweep.run import run_sweep
    from orchestrator.train.worker.observers import stop_on_signal
    from orchestrator.train.worker.run_dir import check_links

    check_ground(sweep, prepared, ground, before)
    folder = before.folder if before else _new_folder(prepared.resolved.config)
    check_links(folder)
    done = before.rows if before else ()
    secrets = secret_values()
    ledger, screen = (
        Ledger(folder, secrets),
        SweepScreen(quiet=quiet, objective=sweep.objective, rows=done, secrets=secrets),
    )
    screen.begin(sweep.num_trials, len(done))
    try:
        if before is None:
            ledger.begin(_header(sweep, prepared, ground))
        with stop_on_signal() as asked:
            run_sweep(sweep, prepared, ground, ledger, done, screen, asked)
            stopped = asked()
    finally:
        screen.close()
        ledger.close()
    return _concluded(sweep, folder, screen, stopped)


def conclude(sweep: Sweep, folder: Path, quiet: bool) -> SweepRecord:
    """The end of a sweep whose trials are all made already: the report, drawn anew, and how it ended."""
    from orchestrator.record.sweep_screen import SweepScreen

    screen = SweepScreen(quiet=quiet, objective=sweep.objective, secrets=secret_values())
    screen.note(f"all {sweep.num_trials} trials of {folder} are made already; the report is drawn anew")
    return _concluded(sweep, folder, screen, stopped=False)


def _concluded(sweep: Sweep, folder: Path, screen: SweepScreen, stopped: bool) -> SweepRecord:
    from orchestrator.report.sweep.page import draw_sweep

    record = read_sweep_record(folder)
    draw_sweep(folder)
    if stopped:
        raise Interrupted(
            f"interrupted after {len(record.rows)} of {sweep.num_trials} trials; go on with: orchestrator sweep --resume {folder}"
        )
    if record.best() is None:
        raise _nothing(record)
    for line in outcome(record):
        screen.note(line)
    return record


def _nothing(record: SweepRecord) -> OrchestratorError:
    """Why a sweep has no result: for want of devices or memory alone, or because trials failed."""
    wanting = all(row.status in ("infeasible", "out_of_memory") for row in record.rows)
    told = f"none of the {len(record.rows)} trials completed" + (
        ", for want of devices or memory" if wanting else ""
    )
    return (ResourceError if wanting else TrainingFailed)(
        f"{told}; their reasons are in {record.folder / 'report.html'}"
    )


def is_made(sweep: Sweep, before: SweepRecord) -> bool:
    """Whether a sweep that is to go on has all its trials already."""
    return len(before.rows) >= sweep.num_trials


def check_ground(sweep: Sweep, prepared: PreparedRun, ground: SweepDevices, before: SweepRecord | None) -> None:
    """What would make rows that do not compare, or none at all."""
    if sweep.objective == "validation_loss" and not prepared.facts.validation_samples:
        raise UserError("--objective validation_loss needs validation data; the task has none")
    if before is None:
        return
    now = {
        "kind": "gpu" if ground.on_gpu else "cpu",
        "device_name": ground.name,
        "cores_per_worker": ground.cores,
    }
    for name, value in now.items():
        if before.header.get(name) != value:
            raise UserError(
                f"the sweep in {before.folder} was begun with {name} {before.header.get(name)}, and here it is {value}: the rows would not "
                "compare. Go on where it was begun, or begin another sweep here"
            )


def _header(sweep: Sweep, prepared: PreparedRun, ground: SweepDevices) -> dict[str, Any]:
    config = prepared.resolved.config
    left = {name: value for name, value in changed_settings(config).items() if name not in SETTINGS_NOT_KEPT}
    return {
        "version": VERSION,
        "task": config.task,
        **sweep.header(),
        "seed": config.run.seed,
        "settings": left,
        "kind": "gpu" if ground.on_gpu else "cpu",
        "devices": ground.devices,
        "device_name": ground.name,
        "cores_per_worker": ground.cores,
        "samples": prepared.facts.samples,
        "epochs": config.run.epochs,
    }


def outcome(record: SweepRecord) -> list[str]:
    """How a sweep ended, in two lines."""
    from orchestrator.report.sweep.facts import is_python_task, train_command, tuned_command

    best = record.best()
    assert best is not None
    figure = f"{best.samples_per_second:,.0f} samples/s" if best.samples_per_second else ""
    if record.objective == "validation_loss":
        figure = f"validation loss {best.validation_loss:.4f}, {figure}"
    command = train_command(record, best) if is_python_task(record) else tuned_command(record)
    return [
        f"{len(record.rows)} trials; the best is number {best.trial}: {' '.join(point_flags(best.point))} ({figure})",
        f"report: {record.folder / 'report.html'}; train with it: {command}",
    ]


def check_new(config: Config) -> None:
    """A folder that holds a sweep is not begun anew."""
    folder = _named(config)
    if folder is not None and holds_sweep(folder):
        raise UserError(
            f"{folder} holds a sweep already; go on with it by --resume {folder}, or choose another --run-dir or --name"
        )


def _named(config: Config) -> Path | None:
    return config.run.run_dir or (results_folder() / config.run.name if config.run.name else None)


def _new_folder(config: Config) -> Path:
    from orchestrator.train.worker.run_dir import task_name

    check_new(config)
    folder = _named(config) or results_folder() / f"sweep-{task_name(config)}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --run-dir"
        ) from None
    return folder
