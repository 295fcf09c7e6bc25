"""The ledger of a sweep: ``sweep.jsonl``, one JSON object a line, appended and flushed. What stands in it is done: a sweep that
was broken off goes on with the rest.

| event | fields besides ``event`` and ``time`` (unix seconds)                                                              |
|-------|-------------------------------------------------------------------------------------------------------------------|
| sweep | version, task, space {setting: its domain as text}, domains (the same for machines), points (where just these are     |
|       | tried), search (grid, random, optuna), trials (how many are to be run), seed, objective (throughput,               |
|       | validation_loss), asha, trial_seconds, trial_steps (or null), settings {setting: value, those that were given},     |
|       | kind (cpu, gpu), devices (of the cluster), device_name, cores_per_worker, samples, epochs                           |
| trial | trial (number, from 1), point {setting: value}, status, reason (why it is not completed; else ""), seconds (from when  |
|       | its leader has it to its figures); and where something was measured the fields of ``Row``                           |

``status`` is ``completed``; ``stopped``, early, because others were better; ``failed``; ``out_of_memory``; or ``infeasible``,
where the cluster has not what the trial asks for, so that it never began. A later line of the same trial counts.
"""

from __future__ import annotations

import fcntl
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.record.events import Event, EventLog, of_kind, read_events
from orchestrator.redaction import Secrets

LEDGER = "sweep.jsonl"
STATUSES = ("completed", "stopped", "failed", "out_of_memory", "infeasible")


_NEVER_KEPT = frozenset({"resume", "run_dir", "name", "ray_address", "resource_timeout"})


@dataclass(frozen=True)
class TrialRow:
    """One trial. What was not measured is None or empty."""

    trial: int
    point: Mapping[str, Any]
    status: str
    reason: str = ""
    seconds: float = 0.0
    start_seconds: float | None = None
    """Of these, what the trial cost beyond its steps."""
    workers: int | None = None
    device: str | None = None
    strategy: str | None = None
    precision: str | None = None
    batch_size: int | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    compile: bool | None = None
    samples_per_second: float | None = None
    interval: float | None = None
    """Half the width of the 95 % confidence interval of the throughput, as a part of it."""
    units_per_second: float | None = None
    unit: str | None = None
    step_seconds: float | None = None
    steps: int | None = None
    peak_memory_bytes: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step of data, forward, backward, optimizer and, on several workers, communication."""
    train_loss: float | None = None
    validation_loss: float | None = None

    @property
    def measured(self) -> bool:
        return self.samples_per_second is not None and self.samples_per_second > 0

    def score(self, objective: str) -> float | None:
        """The larger the better; None where the trial has none."""
        if objective == "validation_loss":
            return (
                -self.validation_loss
                if self.validation_loss is not None and math.isfinite(self.validation_loss)
                else None
            )
        return self.samples_per_second if self.measured else None


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as it stands in its ledger."""

    folder: Path
    header: Event
    rows: tuple[TrialRow, ...]

    @property
    def objective(self) -> str:
        return str(self.header.get("objective", "throughput"))

    def best(self) -> TrialRow | None:
        """The best completed trial by the objective."""
        scored = [
            (score, -row.trial, row)
            for row in self.rows
            if row.status == "completed" and (score := row.score(self.objective)) is not None
        ]
        return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def read_sweep_record(folder: Path) -> SweepRecord:
    """The sweep of a folder. UserError where there is none."""
    events = read_events(folder / LEDGER)
    headers = of_kind(events, "sweep")
    if not headers:
        raise UserError(
            f"{folder} holds no sweep: {LEDGER} was needed there; give the folder that 'orchestrator sweep' wrote"
        )
    rows = {row.trial: row for event in of_kind(events, "trial") if (row := parse_trial(event)) is not None}
    settings = headers[-1].get("settings")
    for names in (settings if isinstance(settings, dict) else {}, *(row.point for row in rows.values())):
        if foreign := _NEVER_KEPT & names.keys():
            raise UserError(
                f"{folder / LEDGER} sets {min(foreign)}, which no sweep keeps: someone changed it. Where a run goes, and which cluster it "
                "joins, is yours to say; take the line out, or sweep anew"
            )
    return SweepRecord(folder, headers[-1], tuple(rows[number] for number in sorted(rows)))


def holds_sweep(folder: Path) -> bool:
    return bool(of_kind(read_events(folder / LEDGER), "sweep"))


def parse_trial(event: Event) -> TrialRow | None:
    """The row of a line; None for one that is no trial of ours. Fields that it does not know are left out, and so are values
    of another kind than the field's: a damaged figure is no figure."""
    if (
        not _is(event.get("trial"), "int")
        or not isinstance(event.get("point"), dict)
        or event.get("status") not in STATUSES
    ):
        return None
    known = {f.name: str(f.type) for f in fields(TrialRow)}
    return TrialRow(**{name: value for name, value in event.items() if name in known and _is(value, known[name])})


_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "Mapping[": (dict,),
}


def _is(value: Any, declared: str) -> bool:
    kinds = next(kinds for start, kinds in _KINDS.items() if declared.startswith(start))
    endless = isinstance(value, int | float) and not abs(value) <= sys.float_info.max
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)) and not endless


class Ledger:
    """The ledger of a sweep that is under way."""

    def __init__(self, folder: Path, secrets: Secrets = ()) -> None:
        self._lock = (folder / LEDGER).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{folder} is being swept by another process; wait for it, or end it first"
            ) from None
        self._log = EventLog(folder / LEDGER, secrets=secrets)

    def begin(self, header: Mapping[str, Any]) -> None:
        self._log.write("sweep", **header)

    def add(self, row: TrialRow) -> None:
        filled = {f.name: getattr(row, f.name) for f in fields(TrialRow)}
        needed = ("trial", "point", "status", "reason", "seconds")
        filled["point"] = {
            name: str(value) if isinstance(value, Path) else value for name, value in row.point.items()
        }
        self._log.write(
            "trial",
            **{name: value for name, value in filled.items() if name in needed or value not in (None, {})},
        )

    def close(self) -> None:
        self._log.close()
        self._lock.close()
