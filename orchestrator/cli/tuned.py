"""``train --tuned FOLDER``: the settings of a sweep's best trial that fits the devices of this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.sweep.objective import THROUGHPUT
from orchestrator.config.sweep.space import plain_point, point_flags
from orchestrator.config.sweep.sweep import as_mapping
from orchestrator.config.writer import flat_values
from orchestrator.errors import UserError
from orchestrator.record.files.ledger import SweepRecord, TrialRow, read_sweep_record
from orchestrator.run.run_settings import check_masked
from orchestrator.storage.address import refuse_address
from orchestrator.types import speed_text


def tuned(
    folder: Path, resolved: Resolved, devices: Callable[[Config], tuple[str, int]]
) -> tuple[Resolved, str]:
    """Return the settings with those of the sweep's best fitting trial, and a message that says
    what was taken.

    Flags win over the trial. ``devices`` returns the devices of a run with some settings:
    ``gpu`` or ``cpu``, and their number.
    """
    refuse_address("--tuned", folder)
    record = read_sweep_record(folder)
    _check_task(record, resolved)
    flags = {name for name, origin in resolved.origins.items() if origin.startswith("flag")}
    base = {"task": str(record.header.get("task", "")), **as_mapping(record.header.get("settings"))}
    base_config = resolved.config.but(**{name: value for name, value in base.items() if name not in flags})
    kind, num_devices = devices(base_config)
    workers = resolved.config.parallel.workers if "workers" in flags else None
    row, notes = _best_fitting_row(record, kind, num_devices, workers)
    offered = {**base, **row.point, "workers": row.workers or 1}
    taken = {name: value for name, value in offered.items() if name not in flags}
    check_masked(taken, frozenset(), f"the ledger of {folder}")
    origins = dict(resolved.origins) | dict.fromkeys(taken, f"sweep {folder.name}, trial {row.trial}")
    config = resolved.config.but(**taken)
    point = " ".join(point_flags(row.point))
    first = f"settings of trial {row.trial} of {folder}: {point} ({_result_text(row, record)})"
    message = "\n".join([first, *notes, *_difference_notes(resolved, config, offered)])
    return Resolved(config, origins), message


def _check_task(record: SweepRecord, resolved: Resolved) -> None:
    task = str(record.header.get("task", ""))
    if task.startswith("python:"):
        raise UserError(
            f"--tuned {record.folder} was swept in Python, over an object that no command line can "
            f"name ({task}); "
            "its report.html has the line of Python that trains with the best settings"
        )
    if "task" in resolved.origins and resolved.config.task != task:
        raise UserError(
            f"--tuned {record.folder} is a sweep of {task}, and {resolved.config.task} is to be trained; "
            "sweep over that one, or leave --tuned out"
        )


def _result_text(row: TrialRow, record: SweepRecord) -> str:
    if record.objective == THROUGHPUT:
        return f"{speed_text(row.samples_per_second)} samples/s"
    return f"{record.criterion.name.replace('_', ' ')} {row.value(record.objective)}"


def _difference_notes(resolved: Resolved, config: Config, offered: Mapping[str, Any]) -> list[str]:
    """Return notes on the user's flags that won over the trial, and on settings of the user's
    file that lost."""
    used_values = flat_values(config)
    requested_values = flat_values(resolved.config)
    won: list[str] = []
    lost: list[str] = []
    for name, value in offered.items():
        origin = resolved.origin(name)
        used = used_values[name]
        requested = requested_values[name]
        if origin.startswith("flag") and used != plain_point({name: value})[name]:
            won.append(f"{' '.join(point_flags({name: used})) or f'no {name}'} over {value}")
        elif origin.startswith("file") and used != requested:
            lost.append(f"{name} {requested} ({origin}) to {used}")
    notes: list[str] = []
    if won:
        notes.append(f"your flags won, so it is not the trial that was measured: {', '.join(won)}")
    if lost:
        notes.append(f"settings of your file gave way: {', '.join(lost)}; give them as flags to keep them")
    return notes


def _best_fitting_row(
    record: SweepRecord, kind: str, num_devices: int, workers: int | str | None
) -> tuple[TrialRow, list[str]]:
    """Return the best row that fits the devices, and notes: a better one that does not, and ties."""
    from orchestrator.report.sweep.facts import ties_text

    available = _num_workers(record, kind, num_devices)
    best = record.best()
    if best is None:
        raise UserError(
            f"--tuned {record.folder}: none of its {len(record.rows)} trials completed; see its report.html"
        )
    rows = [row for row in record.rows if (row.workers or 1) <= available]
    if isinstance(workers, int):
        rows = [row for row in rows if row.workers == workers]
    fitting_record = replace(record, rows=tuple(rows))
    fitting = fitting_record.best()
    if fitting is None:
        raise _nothing_fits(record, available, workers)
    ties = [ties_text(fitting_record)] if fitting_record.tied() else []
    if fitting is best:
        return fitting, ties
    here = f"{available} device{'s are' if available != 1 else ' is'} here"
    reason = f"--workers {workers} was asked for" if (best.workers or 1) <= available else here
    note = (
        f"passed over trial {best.trial} ({_result_text(best, record)}): "
        f"it has {best.workers or 1} workers, and {reason}"
    )
    return fitting, [note, *ties]


def _num_workers(record: SweepRecord, kind: str, num_devices: int) -> int:
    """Return the number of workers that fit here; on CPUs each has as many cores as in the sweep."""
    swept_kind = record.header.get("kind")
    if swept_kind != kind:
        raise UserError(
            f"--tuned {record.folder} was swept on {swept_kind}s, and this run has {kind}s: "
            "its figures mean nothing here; sweep anew"
        )
    cores = record.header.get("cores_per_worker")
    return num_devices // cores if kind == "cpu" and isinstance(cores, int) and cores > 0 else num_devices


def _nothing_fits(record: SweepRecord, available: int, workers: int | str | None) -> UserError:
    completed = sorted({row.workers or 1 for row in record.rows if row.status == "completed"})
    numbers = ", ".join(str(number) for number in completed)
    if isinstance(workers, int) and workers <= available:
        need = f"--workers {workers}"
    else:
        need = f"{available} device{'s' * (available != 1)}"
    return UserError(
        f"--tuned {record.folder}: its completed trials have {numbers} workers, and none fits {need}; "
        "sweep anew"
    )
