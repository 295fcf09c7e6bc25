"""Tables of a run as DataFrames, for notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.record.files.remote_record import local_record
from orchestrator.report.run.figures.read import RunRecord, read_run_record
from orchestrator.types import PHASES

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Frame = Any
"""A DataFrame inside the report. pandas annotates indexing with unions that no type checker narrows."""

MAX_METRICS = 256
"""A run has a handful of metrics; with a new name in each line a table would outgrow the memory."""

_MAX_INTEGER = 2**53


_TABLES: dict[str, tuple[type[Event], str | None]] = {
    "steps": (kinds.Step, "step"),
    "evaluations": (kinds.Evaluation, "step"),
    "epochs": (kinds.Epoch, "epoch"),
    "phases": (kinds.Phases, "step"),
    "exchanges": (kinds.Exchange, "step"),
    "expert_changes": (kinds.ExpertChange, None),
    "checkpoints": (kinds.Checkpoint, None),
    "failures": (kinds.Failure, None),
    "recoveries": (kinds.Recovery, None),
}
"""The events of each table, and the field of its index. The other fields are its columns."""
_MAPPINGS = ("metrics", "memory")
"""Fields of which each value has a column."""


def read_run(folder: str | Path, table: str = "steps") -> DataFrame:
    """Return a table of a run folder, which may be remote (``s3://bucket/run1``)::

        steps = orchestrator.read_run("results/digits")
        steps[["loss", "validation_loss"]].interpolate().plot()
        orchestrator.read_run("results/digits", "recoveries")

    ``steps`` has one row per training step and is indexed by the step. A step that was replayed
    after a recovery counts once, by its last line. Its columns are the fields of the step event
    (``epoch``, ``loss``, ``grad_norm``, ``lr``, ``samples``, ``units``, ``seconds``, ``warm_up``,
    ``time``), the task's metrics under their own names (``accuracy``), and the evaluation after
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
    scores = evaluations.drop(columns=["time", "epoch", "samples", "bad_samples", "seconds", "best"])
    names = {name: _free_name(f"validation_{name}", steps.columns) for name in scores.columns}
    return steps.join(scores.rename(columns=names))


def _event_frame(record: RunRecord, name: str) -> Frame:
    import pandas as pd

    cls, index = _TABLES[name]
    events = _events(record, cls)
    names = [field.name for field in fields(cls) if field.name not in (index, "time", *_MAPPINGS)]
    names.append("time")
    columns = {_column_name(cls, name): [_plain(getattr(event, name)) for event in events] for name in names}
    columns |= _nested_columns(record, cls, events, [*names, index])
    frame = pd.DataFrame({column: as_column(values) for column, values in columns.items()})
    frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True, errors="coerce")
    if index is not None:
        frame.index = pd.Index(as_column([getattr(event, index) for event in events]), name=index)
    return frame


def _column_name(cls: type[Event], name: str) -> str:
    """Return the column of a field: phases are named with their unit."""
    return f"{name}_seconds" if cls is kinds.Phases and name in (*PHASES, "total") else name


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _nested_columns(
    record: RunRecord, cls: type[Event], events: Sequence[Any], taken: Sequence[Any]
) -> dict[str, list[Any]]:
    """Return the columns of what an event holds in a mapping."""
    if cls is kinds.Epoch:
        return {
            f"memory_{name}_bytes": [getattr(event.memory, name, None) for event in events]
            for name in ("allocated", "reserved")
        }
    if cls in (kinds.Step, kinds.Evaluation):
        metrics = [event.metrics for event in events]
        names = _metric_names(record.folder, metrics)
        return {_free_name(name, taken): [values.get(name) for values in metrics] for name in names}
    return {}


def _events(record: RunRecord, cls: type[Event]) -> Sequence[Event]:
    """Return the events of a table; of replayed steps and epochs the last ones."""
    effective: dict[type[Event], Sequence[Event]] = {
        kinds.Step: record.steps,
        kinds.Evaluation: record.evaluations,
        kinds.Epoch: record.epochs,
        kinds.Phases: record.phases,
        kinds.Exchange: record.exchanges,
        kinds.ExpertChange: record.expert_changes,
    }
    return effective[cls] if cls in effective else record.of(cls)


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
