"""A sweep from start to report: the folder, the ledger, the trials, the tables and pictures."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.settings import Config
from orchestrator.config.sweep.objective import THROUGHPUT
from orchestrator.config.sweep.space import point_flags
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.config.writer import changed_settings
from orchestrator.errors import Interrupted, OrchestratorError, ResourceError, TrainingFailed, UserError
from orchestrator.plan.inventory.hardware import results_folder, secret_values
from orchestrator.record.files.ledger import (
    SETTINGS_NOT_KEPT,
    Ledger,
    SweepRecord,
    holds_sweep,
    read_sweep_record,
)
from orchestrator.storage.address import refuse_address
from orchestrator.types import VERSION, speed_text

if TYPE_CHECKING:
    from orchestrator.live.screen.sweep_screen import SweepScreen
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.runtime.sweep.devices import SweepDevices


def run_trials(
    sweep: Sweep, prepared: PreparedRun, devices: SweepDevices, earlier: SweepRecord | None, quiet: bool
) -> SweepRecord:
    """Run the trials that are not done yet, and draw the report."""
    from orchestrator.live.screen.sweep_screen import SweepScreen
    from orchestrator.run.run_dir import check_links
    from orchestrator.runtime.sweep.run import SweepRun
    from orchestrator.train.worker.observers import stop_on_signal

    check_comparable(sweep, prepared, devices, earlier)
    folder = earlier.folder if earlier else _new_folder(prepared.resolved.config)
    check_links(folder)
    done = earlier.rows if earlier else ()
    secrets = secret_values()
    ledger = Ledger(folder, secrets)
    screen = SweepScreen(quiet=quiet, objective=sweep.objective, rows=done, secrets=secrets)
    screen.begin(sweep.num_trials, len(done))
    try:
        if earlier is None:
            ledger.begin(_header(sweep, prepared, devices))
        with stop_on_signal() as stop_requested:
            SweepRun(sweep, prepared, devices, ledger, done, screen, stop_requested).run()
            was_stopped = stop_requested()
    finally:
        screen.close()
        ledger.close()
    return _report(sweep, folder, screen, was_stopped)


def finish_sweep(sweep: Sweep, folder: Path, quiet: bool) -> SweepRecord:
    """Draw the report of a sweep whose trials are all done, and say how it ended."""
    from orchestrator.live.screen.sweep_screen import SweepScreen

    screen = SweepScreen(quiet=quiet, objective=sweep.objective, secrets=secret_values())
    screen.note(f"all {sweep.num_trials} trials of {folder} are done already; drawing the report again")
    return _report(sweep, folder, screen, was_stopped=False)


def _report(sweep: Sweep, folder: Path, screen: SweepScreen, was_stopped: bool) -> SweepRecord:
    from orchestrator.report.sweep.page import draw_sweep

    record = read_sweep_record(folder)
    draw_sweep(folder)
    if was_stopped:
        raise Interrupted(
            f"interrupted after {len(record.rows)} of {sweep.num_trials} trials; "
            f"continue with: orchestrator resume {folder}"
        )
    if record.best() is None:
        raise _without_result(record)
    for line in outcome_lines(record):
        screen.note(line)
    return record


def _without_result(record: SweepRecord) -> OrchestratorError:
    """Return the error of a sweep without a result: insufficient resources, or failed trials."""
    lacks_resources = all(row.status in ("infeasible", "out_of_memory") for row in record.rows)
    message = f"none of the {len(record.rows)} trials completed"
    reasons = f"their reasons are in {record.folder / 'report.html'}"
    if len({row.reason for row in record.rows}) == 1:
        reasons = f"the reason of each: {record.rows[0].reason}"
    if lacks_resources:
        return ResourceError(f"{message}, for lack of devices or memory; {reasons}")
    return TrainingFailed(f"{message}; {reasons}")


def is_complete(sweep: Sweep, earlier: SweepRecord) -> bool:
    """Return whether a sweep to continue has all its trials already."""
    return len(earlier.rows) >= sweep.num_trials


def check_comparable(
    sweep: Sweep, prepared: PreparedRun, devices: SweepDevices, earlier: SweepRecord | None
) -> None:
    """Refuse a sweep whose trials would have no score, would not differ, or not compare with earlier ones."""
    from orchestrator.tasks.read_settings import check_sweep_taken

    if sweep.objective != THROUGHPUT and prepared.facts.validation_samples == 0:
        raise UserError(f"--objective {sweep.objective} needs validation data; the task has none")
    check_sweep_taken(prepared.resolved.config.task, sweep.space.domains, prepared.facts.settings)
    if earlier is None:
        return
    for name, value in _device_facts(devices).items():
        before = earlier.header.get(name)
        if before != value:
            raise UserError(
                f"the sweep in {earlier.folder} was started with {name} {before}, and here it is {value}: "
                "the trials would not compare. Continue on the first machine, or start another sweep here"
            )


def _device_facts(devices: SweepDevices) -> dict[str, Any]:
    """Return the facts about a device that must be the same for all trials of a sweep."""
    return {
        "kind": "gpu" if devices.on_gpu else "cpu",
        "device_name": devices.name,
        "cores_per_worker": devices.cores,
    }


def _header(sweep: Sweep, prepared: PreparedRun, devices: SweepDevices) -> dict[str, Any]:
    config = prepared.resolved.config
    settings = changed_settings(config)
    return {
        "version": VERSION,
        "task": config.task,
        **sweep.header(),
        "seed": config.run.seed,
        "settings": {name: value for name, value in settings.items() if name not in SETTINGS_NOT_KEPT},
        **_device_facts(devices),
        "devices": devices.devices,
        "samples": prepared.facts.samples,
        "epochs": config.run.epochs,
    }


def outcome_lines(record: SweepRecord) -> list[str]:
    """Return the outcome of a sweep in a few lines."""
    from orchestrator.report.sweep.facts import (
        counts_text,
        edge_text,
        is_python_task,
        objective_name,
        status_counts,
        ties_text,
        train_command,
        tuned_command,
    )

    best = record.best()
    assert best is not None
    figure = f"{speed_text(best.samples_per_second)} samples/s" if best.samples_per_second else ""
    if record.objective != THROUGHPUT:
        figure = f"{objective_name(record)} {best.value(record.objective):.4f}, {figure}"
    flags = " ".join(point_flags(best.point))
    remarks = [text for text in (ties_text(record), edge_text(record)) if text]
    # Failed trials are named: a winner of few is worth less.
    counts = f" ({counts_text(record.rows)})" if len(status_counts(record.rows)) > 1 else ""
    command = train_command(record, best) if is_python_task(record) else tuned_command(record)
    return [
        f"{len(record.rows)} trials{counts}; the best is number {best.trial}: {flags} ({figure})",
        *remarks,
        f"report: {record.folder / 'report.html'}; train with it: {command}",
    ]


def check_new(config: Config) -> None:
    """Refuse to start a sweep in a folder that holds one."""
    folder = _named_folder(config)
    if folder is not None and holds_sweep(folder):
        raise UserError(
            f"{folder} holds a sweep already; continue it with: orchestrator resume {folder}; "
            "or choose another --run-dir or --name"
        )


def _named_folder(config: Config) -> Path | None:
    refuse_address("--run-dir of a sweep", config.run.run_dir)
    return config.run.run_dir or (results_folder() / config.run.name if config.run.name else None)


def _new_folder(config: Config) -> Path:
    from orchestrator.run.run_dir import task_name

    check_new(config)
    default = results_folder() / f"sweep-{task_name(config)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = _named_folder(config) or default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --run-dir"
        ) from None
    return folder
