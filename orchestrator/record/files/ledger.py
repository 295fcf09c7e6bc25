"""The ledger of a sweep: ``sweep.jsonl``, one JSON object per line, appended and flushed.

A trial in the ledger is done: an interrupted sweep continues with the other trials.

| event | fields besides ``event`` and ``time`` (unix seconds)                                            |
|-------|-------------------------------------------------------------------------------------------------|
| sweep | version, task, space {setting: its domain as text}, domains (the same for programs), points (if   |
|       | the sweep tries a list of points), search (grid, random, optuna), trials (planned number), seed,  |
|       | objective (throughput, validation_loss, or a metric with its direction: accuracy:max), asha,      |
|       | trial_seconds, trial_steps (or null), settings                                                    |
|       | {setting: value, as the user set them}, kind (cpu, gpu), devices (of the cluster), device_name,   |
|       | cores_per_worker, samples, epochs                                                                 |
| trial | trial (number, from 1), point {setting: value}, status, reason (of a trial that did not complete; |
|       | else ""), seconds (from its assignment to its result); the fields of ``TrialRow`` that were       |
|       | measured                                                                                          |

``status`` is ``completed``; ``stopped``, early, since other trials were better; ``failed``;
``out_of_memory``; or ``infeasible``: the devices cannot run it, so the trial never started.
The last line of a trial counts.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from orchestrator.config.metric import Criterion
from orchestrator.config.sweep.objective import THROUGHPUT, VALIDATION_LOSS, read_objective
from orchestrator.errors import UserError
from orchestrator.record.events.decoding import Count, Finite, Measure, decode, finite
from orchestrator.record.events.kinds import Event, JsonEvent
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.redaction import Secrets

LEDGER = "sweep.jsonl"
STATUSES = ("completed", "stopped", "failed", "out_of_memory", "infeasible")

SETTINGS_NOT_KEPT = frozenset({"resume", "run_dir", "name", "ray_address", "resource_timeout"})
"""Settings that a ledger never holds: the user gives them anew when the sweep continues."""

_REQUIRED = ("trial", "point", "status", "reason", "seconds")


def _status(value: Any) -> str | None:
    return value if isinstance(value, str) and value in STATUSES else None


@dataclass(frozen=True)
class TrialRow:
    """One trial of a sweep. Fields that were not measured are None or empty."""

    trial: Count
    point: Mapping[str, Any]
    status: Annotated[str, _status]
    reason: str = ""
    seconds: Measure = 0.0
    start_seconds: Measure | None = None
    """The part of ``seconds`` that the trial spent outside its steps."""
    retries: Count | None = None
    """Times that the trial was tried again, since one of its processes was lost."""
    workers: Count | None = None
    device: str | None = None
    strategy: str | None = None
    precision: str | None = None
    batch_size: Count | None = None
    accumulation_steps: Count | None = None
    global_batch_size: Count | None = None
    compile: bool | None = None
    samples_per_second: Measure | None = None
    interval: Measure | None = None
    """Half the width of the throughput's 95 % confidence interval, as a fraction of the throughput."""
    units_per_second: Measure | None = None
    unit: str | None = None
    step_seconds: Measure | None = None
    steps: Count | None = None
    peak_memory_bytes: Count | None = None
    phases: Mapping[str, Measure] = field(default_factory=dict)
    """Seconds per step of data, forward, backward, optimizer and, on several workers, communication."""
    train_loss: Finite | None = None
    validation_loss: Finite | None = None
    metrics: Mapping[str, Finite] = field(default_factory=dict)
    """Validation metrics of the task, by name."""

    @property
    def measured(self) -> bool:
        return self.samples_per_second is not None and self.samples_per_second > 0

    def score(self, objective: str) -> float | None:
        """Return the trial's score, larger is better; None if the trial has none."""
        value = self.value(objective)
        return None if value is None else read_objective(objective).score(value)

    def value(self, objective: str) -> float | None:
        """Return the figure that the objective names; None if it was not measured, or is not finite."""
        if objective == THROUGHPUT:
            return self.samples_per_second if self.measured else None
        if objective == VALIDATION_LOSS:
            return finite(self.validation_loss)
        return finite(self.metrics.get(read_objective(objective).name))


def rank_trials(rows: Iterable[TrialRow], objective: str) -> list[TrialRow]:
    """Return the completed trials with a finite score, the best first; of equal ones the earlier first."""
    scored = [
        (score, -row.trial, row)
        for row in rows
        if row.status == "completed" and (score := row.score(objective)) is not None and math.isfinite(score)
    ]
    return [row for *_, row in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def tied_trials(rows: Iterable[TrialRow], objective: str) -> list[TrialRow]:
    """Return the trials that are not shown to be worse than the best one, without it.

    By throughput they are those whose 95 % interval overlaps that of the best; a trial that was
    too short for an interval shows nothing. Other objectives have no interval: equal values tie."""
    ranked = rank_trials(rows, objective)
    if not ranked:
        return []
    best, *others = ranked
    if objective != THROUGHPUT:
        return [row for row in others if row.value(objective) == best.value(objective)]
    lowest = _bound(best, -1)
    return [row for row in others if _bound(row, +1) >= lowest]


def _bound(row: TrialRow, side: int) -> float:
    """Return an end of the throughput's interval: the lower (-1) or the upper (+1)."""
    interval = math.inf if row.interval is None else row.interval
    return (row.samples_per_second or 0.0) * (1 + side * interval)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as its ledger describes it."""

    folder: Path
    header: JsonEvent
    rows: tuple[TrialRow, ...]

    @property
    def objective(self) -> str:
        """The objective; throughput if the ledger is damaged."""
        objective = str(self.header.get("objective", THROUGHPUT))
        try:
            read_objective(objective)
        except ValueError:
            return THROUGHPUT
        return objective

    @property
    def criterion(self) -> Criterion:
        return read_objective(self.objective)

    def tied(self) -> list[TrialRow]:
        """Return the trials that are not shown to be worse than the best one."""
        return tied_trials(self.rows, self.objective)

    def ranked(self) -> list[TrialRow]:
        """Return the completed trials with a result, the best first."""
        return rank_trials(self.rows, self.objective)

    def best(self) -> TrialRow | None:
        return next(iter(self.ranked()), None)


def read_sweep_record(folder: Path) -> SweepRecord:
    """Read the sweep of a folder; UserError if there is none or its ledger was tampered with."""
    events = read_events(folder / LEDGER)
    headers = of_kind(events, "sweep")
    if not headers:
        raise UserError(
            f"{folder} holds no sweep: it has no {LEDGER} with a header; "
            "give the folder that 'orchestrator sweep' wrote"
        )
    header = headers[-1]
    trials = [parse_trial(event) for event in of_kind(events, "trial")]
    rows = {row.trial: row for row in trials if row is not None}
    settings = header.get("settings")
    _check_settings(folder, settings if isinstance(settings, dict) else {})
    for row in rows.values():
        _check_settings(folder, row.point)
    return SweepRecord(folder, header, tuple(rows[number] for number in sorted(rows)))


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings that decide where a run writes and which cluster it joins: they come from
    the user only."""
    foreign = SETTINGS_NOT_KEPT & settings.keys()
    if foreign:
        raise UserError(
            f"{folder / LEDGER} sets {min(foreign)}, which no sweep records: the file was changed. "
            "Only you choose the run folder and the cluster; remove the line, or start a new sweep"
        )


def holds_sweep(folder: Path) -> bool:
    return bool(of_kind(read_events(folder / LEDGER), "sweep"))


def parse_trial(event: JsonEvent) -> TrialRow | None:
    """Return the trial of an event; None if it is none. A damaged figure is no figure."""
    return decode(TrialRow, event)


class _Line(Event):
    """A line of a ledger, whose readers need no class for it."""

    content: JsonEvent = field()


class _LedgerLog(EventLog):
    def _content(self, event: Event) -> JsonEvent:
        assert isinstance(event, _Line)
        return event.content | {"time": event.time}


class Ledger:
    """The ledger of a running sweep, locked against a second process."""

    def __init__(self, folder: Path, secrets: Secrets = ()) -> None:
        self._lock = (folder / LEDGER).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is running the sweep in {folder}; wait for it, or end it first"
            ) from None
        self._log = _LedgerLog(folder / LEDGER, secrets=secrets)

    def begin(self, header: Mapping[str, Any]) -> None:
        self._log.write(_Line(content={"event": "sweep", **header}))

    def add(self, row: TrialRow) -> None:
        values = {field.name: getattr(row, field.name) for field in fields(TrialRow)}
        values["point"] = {
            name: str(value) if isinstance(value, Path) else value for name, value in row.point.items()
        }
        written = {
            name: value for name, value in values.items() if name in _REQUIRED or value not in (None, {})
        }
        self._log.write(_Line(content={"event": "trial", **written}))

    def close(self) -> None:
        self._log.close()
        self._lock.close()
