"""Texts about a sweep that tables, pictures and page share: swept settings, values, counts, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.config.settings import setting_types
from orchestrator.config.sweep.objective import THROUGHPUT
from orchestrator.config.sweep.space import point_flags, point_key
from orchestrator.record.files.ledger import STATUSES, SweepRecord, TrialRow
from orchestrator.report.sweep.scaling import ScalingSeries
from orchestrator.report.sweep.sweep_table import throughput_text
from orchestrator.report.sweep.trials import (
    PLANNED,
    num_devices,
    throughput,
    trial_settings,
)
from orchestrator.types import counted, printable, seconds_text, speed_text, value_text

SHORT_STATUS = {
    "completed": "done",
    "stopped": "stopped",
    "failed": "failed",
    "out_of_memory": "OOM",
    "infeasible": "infeasible",
}
STATUS_WORDS = {status: status.replace("_", " ") for status in STATUSES}
MAX_TIES = 5
_ODD_CHARACTERS = re.compile(r"[^\w @./%+-]")
MAX_VALUE_CHARS = 40
_NOT_TRAINED_WITH = {"task", "name", "run_dir", "resume"}
"""Settings that a command names in another way, or that belong to the sweep's own folder."""
_SHORT_NAMES = {
    "accumulation_steps": "accumulation",
    "parallel_strategy": "strategy",
    "batch_size": "batch",
    "global_batch_size": "global batch",
    "workers": "devices",
}


def title(record: SweepRecord) -> str:
    return one_line(record.folder.resolve().name, 80)


def setting_names(record: SweepRecord) -> list[str]:
    """Return every setting of the space, in its order, and any other setting of the points."""
    space = record.header.get("space")
    names = [str(name) for name in space] if isinstance(space, dict) else []
    return list(dict.fromkeys([*names, *(str(name) for row in record.rows for name in row.point)]))


def swept_settings(record: SweepRecord) -> list[str]:
    """Return the settings with two values or more among the trials."""
    names = []
    for name in setting_names(record):
        values = {point_key({name: row.point[name]}) for row in record.rows if name in row.point}
        if len(values) > 1:
            names.append(name)
    return names


def other_swept(record: SweepRecord) -> list[str]:
    """Return the swept settings for which scaling tables have no column of their own."""
    own_columns = {*PLANNED, "parallel_strategy"} - {"compile"}
    return [name for name in swept_settings(record) if name not in own_columns]


def name_text(name: str) -> str:
    """Return the name of a setting for people."""
    return one_line(_SHORT_NAMES.get(name, name.replace("_", " ")), MAX_VALUE_CHARS)


def short_value(value: Any) -> str:
    """Return the value of a setting as a short text."""
    return one_line(value_text(value), MAX_VALUE_CHARS).replace("_parallel", " parallel")


def one_line(text: str, max_chars: int = 300) -> str:
    """Return printable text of one line, cut to a length."""
    clean = " ".join(printable(text).split())
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"


def status_counts(rows: Iterable[TrialRow]) -> dict[str, int]:
    """Return the number of trials by status, without statuses that no trial has."""
    ends = [row.status for row in rows]
    return {status: ends.count(status) for status in STATUSES if status in ends}


def counts_text(rows: Iterable[TrialRow]) -> str:
    rows = tuple(rows)
    parts = [f"{count} {STATUS_WORDS[status]}" for status, count in status_counts(rows).items()]
    num_repeated = sum(bool(row.retries) for row in rows)
    if num_repeated:
        parts.append(f"{num_repeated} tried again after a process was lost")
    return ", ".join(parts) or "none yet"


def num_failed(record: SweepRecord) -> int:
    """Return the number of trials without a result that could have had one."""
    return sum(row.status in ("failed", "out_of_memory") for row in record.rows)


def edge_text(record: SweepRecord) -> str:
    """Return which settings of the best trial are at an end of the grid; empty if none is.

    All tried values count, those of failed trials too: beyond one that failed there is nothing to try.
    A random search has no grid."""
    best = record.best()
    if best is None or record.header.get("search") != "grid":
        return ""
    found = [text for name in swept_settings(record) if (text := _edge_of(record, best, name))]
    if not found:
        return ""
    return f"at the edge of the grid: {', '.join(found)}; a wider one may have a better setting"


def _edge_of(record: SweepRecord, best: TrialRow, name: str) -> str:
    """Return the end of a numeric setting's values at which the best trial is; empty if it is at none."""
    tried = [row.point.get(name) for row in record.rows]
    numbers = [value for value in tried if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(tried):
        return ""
    chosen = best.point[name]
    # Less than one of a count, or than none of an amount, cannot be tried; nor more workers than devices.
    least = 1 if isinstance(chosen, int) else 0
    if chosen == min(numbers) and chosen > least:
        return f"{name_text(name)} {short_value(chosen)} is the smallest that was tried"
    if chosen == max(numbers) and name != "workers":
        return f"{name_text(name)} {short_value(chosen)} is the largest that was tried"
    return ""


def objective_name(record: SweepRecord) -> str:
    """Return the name of the objective for people; a ledger may hold any text as the name of a metric."""
    if record.objective == THROUGHPUT:
        return "samples/s"
    return _ODD_CHARACTERS.sub("", record.criterion.name.replace("_", " "))[:MAX_VALUE_CHARS]


def objective_value(record: SweepRecord, row: TrialRow) -> float | None:
    """Return the figure that people read as the outcome of a trial."""
    return throughput(row) if record.objective == THROUGHPUT else row.value(record.objective)


def objective_text(record: SweepRecord, value: float) -> str:
    return speed_text(value) if record.objective == THROUGHPUT else f"{value:.4g}"


def ties_text(record: SweepRecord) -> str:
    """Return which trials are tied with the best, and why; empty if none is."""
    best = record.best()
    tied = record.tied()
    if best is None or not tied:
        return ""
    numbers = ", ".join(str(row.trial) for row in tied[:MAX_TIES]) + ("" if len(tied) <= MAX_TIES else ", …")
    trials = f"trial{'s' if len(tied) > 1 else ''} {numbers}"
    if record.objective != THROUGHPUT:
        return f"a tie: {trials} {'have' if len(tied) > 1 else 'has'} the same {objective_name(record)}"
    return (
        f"a tie: the intervals of trial {best.trial} ({throughput_text(best)} samples/s) and of {trials} "
        f"({throughput_text(tied[0])}) overlap, so no difference was shown; more --trial-seconds narrow them"
    )


def rate_text(speed: float | None, interval: float | None) -> str:
    """Return '1,234 ± 2.1%'; without '±' if the interval is unknown."""
    spread = f" ± {100 * interval:.1f}%" if speed is not None and interval is not None else ""
    return speed_text(speed) + spread


def hours_text(hours: float | None) -> str:
    return "–" if hours is None else seconds_text(3600 * hours)


def total_seconds(record: SweepRecord) -> float:
    """Return the seconds of all trials together."""
    return sum(row.seconds for row in record.rows)


def space_text(record: SweepRecord) -> str:
    """Return 'precision (fp32,bf16) × batch (16,64)', or '24 listed points of precision, batch'."""
    names = setting_names(record)
    points = record.header.get("points")
    if isinstance(points, list):
        return f"{counted(len(points), 'listed point')} of {', '.join(map(name_text, names))}"
    space = record.header.get("space")
    domains: Mapping[str, Any] = space if isinstance(space, dict) else {}
    parts = [
        f"{name_text(name)} ({one_line(str(domains[name]), 60)})" if name in domains else name_text(name)
        for name in names
    ]
    return " × ".join(parts) or "nothing"


def hardware_text(record: SweepRecord) -> str:
    """Return '8 GPUs (NVIDIA H200)', or the known part of it."""
    header = record.header
    on_gpu = header.get("kind") == "gpu"
    kinds = ("GPU", "GPUs") if on_gpu else ("CPU device", "CPU devices")
    devices = header.get("devices")
    count = counted(devices, *kinds) if isinstance(devices, int) else kinds[1]
    details = [one_line(str(header.get("device_name") or ""), 60)]
    cores = header.get("cores_per_worker")
    if not on_gpu and isinstance(cores, int):
        details.append(f"{counted(cores, 'core')} each")
    text = ", ".join(part for part in details if part)
    return f"{count} ({text})" if text else count


def trials_text(record: SweepRecord) -> str:
    """Return '24 trials', or the number so far of those planned."""
    planned = record.header.get("trials")
    done = len(record.rows)
    if isinstance(planned, int) and planned > done:
        return f"{done} of {counted(planned, 'trial')} so far"
    return counted(done, "trial")


def sentence(record: SweepRecord) -> str:
    """Return a description of the sweep: settings, hardware, measurement, outcome."""
    task = one_line(str(record.header.get("task") or "unknown"), 80)
    search = one_line(str(record.header.get("search") or "unknown"), 20)
    return (
        f"Task {task} on {hardware_text(record)}: swept {space_text(record)} by {search} search "
        f"for the best {objective_name(record)}; {trials_text(record)}: {counts_text(record.rows)}. "
        f"{measurement_text()}"
    )


def measurement_text() -> str:
    return (
        "Throughput is measured after warm-up, which is left out; ± is half the width of its "
        "95% confidence interval (none where a trial was too short for one)."
    )


def train_command(record: SweepRecord, row: TrialRow) -> str:
    """Return the command that trains with a trial's settings: those of the sweep, overridden by the trial's.

    A task that is an object of a Python program has no name for a command line; then it is a line
    of Python.
    """
    given = record.header.get("settings")
    settings = (dict(given) if isinstance(given, dict) else {}) | dict(row.point)
    known = {
        name: value
        for name, value in settings.items()
        if name in setting_types() and name not in _NOT_TRAINED_WITH
    }
    devices = num_devices(row)
    # The plan chose the workers on the cluster of the sweep; another cluster must not choose again.
    if devices is not None and known.get("workers") in (None, "auto"):
        known["workers"] = devices
    if is_python_task(record):
        arguments = ", ".join(f"{name}={value!r}" for name, value in known.items())
        return f"Trainer(…, config=Config.of({arguments})).fit()"
    task = str(record.header.get("task") or "digits")
    return shlex.join(["orchestrator", "train", "--task", task, *point_flags(known)])


def is_python_task(record: SweepRecord) -> bool:
    """Return whether the task was an object of a Python program."""
    return str(record.header.get("task")).startswith("python:")


def tuned_command(record: SweepRecord) -> str:
    return shlex.join(["orchestrator", "train", "--tuned", str(record.folder)])


def point_text(row: TrialRow, names: Iterable[str]) -> str:
    """Return the values that a trial's point has for some settings: 'precision bf16, batch 64'."""
    return ", ".join(
        f"{name_text(name)} {short_value(row.point[name])}" for name in names if name in row.point
    )


def series_label(series: ScalingSeries, shown: Iterable[ScalingSeries]) -> str:
    """Return the settings in which a series differs from the others that are shown."""
    others = list(shown)
    names = list(dict.fromkeys(name for other in others for name in other.settings))
    differing = [
        name for name in names if len({point_key({name: other.settings.get(name)}) for other in others}) > 1
    ]
    labelled = differing or ["batch_size", "accumulation_steps", "global_batch_size"]
    parts = [_labelled(name, series.settings[name]) for name in labelled if name in series.settings]
    parts = parts or ["all alike"]
    if series.base_devices != 1:
        parts.append(f"from {series.base_devices} devices")
    return ", ".join(parts)


def _labelled(name: str, value: Any) -> str:
    # These values need no name: nobody takes 'bf16' for a batch size.
    if name in ("precision", "strategy"):
        return short_value(value)
    return f"{name_text(name)} {short_value(value)}"


def setting_text(row: TrialRow, name: str) -> str:
    """Return the requested value of a setting, and the planned one if it differs: 'auto → bf16'."""
    planned = trial_settings(row).get("strategy" if name == "parallel_strategy" else name)
    if name not in row.point:
        return short_value(planned) if planned is not None else "–"
    requested = short_value(row.point[name])
    if planned is None or short_value(planned) == requested:
        return requested
    return f"{requested} → {short_value(planned)}"
