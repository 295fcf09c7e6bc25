"""Tables of a run as DataFrames, for notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UserError
from orchestrator.record.experts.expert_changes import expert_events
from orchestrator.record.files.events import Event
from orchestrator.record.files.remote_record import local_record
from orchestrator.report.run.figures.read import RunRecord, number, read_run_record, section
from orchestrator.types import PHASES

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Frame = Any
"""A DataFrame inside the report. pandas annotates indexing with unions that no type checker narrows."""

MAX_METRICS = 256
"""A run has a handful of metrics; with a new name in each line a table would outgrow the memory."""

_MAX_INTEGER = 2**53


@dataclass(frozen=True)
class _Table:
    """A kind of event as a table: the field of its index, if any, and its columns."""

    kind: str
    index: str | None
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


_TABLES = {
    "steps": _Table(
        kind="step",
        index="step",
        numbers=("epoch", "loss", "grad_norm", "lr", "samples", "units", "seconds", "time"),
        flags=("warm_up",),
    ),
    "evaluations": _Table(
        kind="evaluate",
        index="step",
        numbers=("epoch", "loss", "samples", "seconds", "time"),
        flags=("best",),
    ),
    "epochs": _Table(
        kind="epoch",
        index="epoch",
        numbers=("step", "loss", "samples", "seconds", "samples_per_second", "time"),
    ),
    "phases": _Table(kind="phases", index="step", numbers=("steps", "time")),
    "exchanges": _Table(kind="exchange", index="step", numbers=("steps", "bytes", "seconds", "rows", "time")),
    "expert_changes": _Table(
        kind="expert",
        index=None,
        numbers=(
            "step",
            "layer",
            "loss_before",
            "loss_after",
            "output_change",
            "seconds",
            "experts",
            "time",
        ),
        texts=("change", "layer_name", "reason"),
    ),
    "checkpoints": _Table(
        kind="checkpoint", index=None, numbers=("step", "bytes", "seconds", "stall", "time"), texts=("path",)
    ),
    "failures": _Table(
        kind="failure",
        index=None,
        numbers=("step", "rank", "time"),
        texts=("kind", "message"),
        flags=("final",),
    ),
    "recoveries": _Table(
        kind="recovery",
        index=None,
        numbers=(
            "step",
            "attempt",
            "workers_before",
            "workers",
            "expert_replicas_before",
            "expert_replicas",
            "lost_steps",
            "detect_seconds",
            "regroup_seconds",
            "restore_seconds",
            "replay_seconds",
            "total_seconds",
            "time",
        ),
        texts=("reason", "source"),
    ),
}


def read_run(folder: str | Path, table: str = "steps") -> DataFrame:
    """Return a table of a run folder, which may be remote (``s3://bucket/run1``)::

        steps = orchestrator.read_run("results/digits")
        steps[["loss", "validation_loss"]].interpolate().plot()
        orchestrator.read_run("results/digits", "recoveries")

    ``steps`` has one row per training step and is indexed by the step. A step that was replayed
    after a recovery counts once, by its last line. Its columns are the fields of the step event
    (``epoch``, ``loss``, ``grad_norm``, ``lr``, ``samples``, ``units``, ``seconds``, ``time``,
    ``warm_up``), the task's metrics under their own names (``accuracy``), and the evaluation after
    the step as ``validation_loss`` and ``validation_accuracy``, which are missing on all other
    steps. A metric whose name is taken has the prefix ``metrics.``.

    The other tables are ``evaluations``, ``epochs``, ``phases`` (seconds per step), ``exchanges``,
    ``expert_changes``, ``checkpoints``, ``failures`` and ``recoveries``, with one row per event of that
    kind. A value that is absent or malformed in the event log is missing in the table.
    """
    if table not in _TABLES:
        raise UserError(f"a run has no table {table!r}; it has {', '.join(_TABLES)}")
    with local_record(folder) as local:
        record = read_run_record(local, whole=True)
    return steps_frame(record) if table == "steps" else _event_frame(record, table)


def steps_frame(record: RunRecord) -> Frame:
    """Return one row per step, with the evaluations joined."""
    steps = _event_frame(record, "steps")
    evaluations = _event_frame(record, "evaluations")
    scores = evaluations.drop(columns=["time", "epoch", "samples", "seconds", "best"])
    names = {name: _free_name(f"validation_{name}", steps.columns) for name in scores.columns}
    return steps.join(scores.rename(columns=names))


def _event_frame(record: RunRecord, name: str) -> Frame:
    import pandas as pd

    table = _TABLES[name]
    events = _events(record, table)
    columns: dict[str, list[Any]] = {}
    columns |= {field: _values(events, field) for field in table.numbers}
    columns |= {field: [_text(event.get(field)) for event in events] for field in table.texts}
    columns |= {field: [event.get(field) is True for event in events] for field in table.flags}
    columns |= _nested_columns(record, table, events)
    frame = pd.DataFrame({column: as_column(values) for column, values in columns.items()})
    frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True, errors="coerce")
    if table.index is not None:
        frame.index = pd.Index(as_column([event[table.index] for event in events]), name=table.index)
    return frame


def _nested_columns(record: RunRecord, table: _Table, events: Sequence[Event]) -> dict[str, list[Any]]:
    """Return the columns that an event holds in a mapping, and the phases, which are named with
    their unit."""
    if table.kind == "phases":
        return {f"{name}_seconds": _values(events, name) for name in (*PHASES, "total")}
    if table.kind == "expert":
        names = ("ids", "parents", "hosts")
        return {name: [_list(event.get(name)) for event in events] for name in names}
    if table.kind == "epoch":
        memory = [section(event, "memory") for event in events]
        return {f"memory_{name}_bytes": _values(memory, name) for name in ("allocated", "reserved")}
    if table.kind in ("step", "evaluate"):
        metrics = [section(event, "metrics") for event in events]
        taken = (*table.numbers, *table.flags, table.index)
        names = _metric_names(record.folder, metrics)
        return {_free_name(name, taken): _values(metrics, name) for name in names}
    return {}


def _values(mappings: Iterable[Mapping[str, Any]], name: str) -> list[float | int | None]:
    return [_number(mapping.get(name)) for mapping in mappings]


def _events(record: RunRecord, table: _Table) -> list[Event]:
    """Return the events of a table; of replayed steps and epochs the last ones."""
    effective = {
        "step": record.steps,
        "evaluate": record.evaluations,
        "epoch": record.epochs,
        "phases": record.phases,
        "exchange": record.exchanges,
        "expert": expert_events(record.events),
    }
    return effective[table.kind] if table.kind in effective else record.of(table.kind)


def _metric_names(folder: Path, metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all metrics in order of appearance; UserError for an absurd number of them."""
    names = dict.fromkeys(name for mapping in metrics for name in mapping)
    if len(names) > MAX_METRICS:
        raise UserError(
            f"the events of {folder} have {len(names)} different metrics; a table takes at most "
            f"{MAX_METRICS}. No task writes so many: the file was probably changed"
        )
    return list(names)


def _free_name(name: str, taken: Iterable[Any]) -> str:
    return f"metrics.{name}" if name in taken else name


def _number(value: Any) -> float | int | None:
    """Return the number in a field of an event; integers stay integers."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER:
        return value
    return number(value)


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def as_column(values: Sequence[Any]) -> Series:
    """Return values as a column of the narrowest type that holds them all; None is a missing value."""
    import pandas as pd

    present = [value for value in values if value is not None]
    has_missing = len(present) < len(values)
    types = {type(value) for value in present}
    largest = max((abs(value) for value in present if type(value) is int), default=0)
    if types == {bool}:
        return pd.Series(values, dtype="boolean" if has_missing else "bool")
    if types == {int} and largest < _MAX_INTEGER:
        return pd.Series(values, dtype="Int64" if has_missing else "int64")
    # A damaged file may hold integers that no float can represent: they stay Python integers.
    if types <= {int, float} and largest <= sys.float_info.max:
        return pd.Series(values, dtype="float64")
    return pd.Series(values, dtype="object")
