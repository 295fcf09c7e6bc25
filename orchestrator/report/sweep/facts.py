"""What tables, pictures and page of a sweep say alike: which settings were swept, values as text, counts, commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.config.settings import setting_types
from orchestrator.config.space import point_flags, point_key
from orchestrator.record.ledger import STATUSES, TrialRow, SweepRecord
from orchestrator.report.run.read import finite
from orchestrator.report.run.stats import plural
from orchestrator.report.sweep.scaling import PLANNED, Series, devices_of, interval_of, settings_of, speed_of
from orchestrator.types import seconds_text

SHORT = {
    "completed": "done",
    "stopped": "stopped",
    "failed": "failed",
    "out_of_memory": "OOM",
    "infeasible": "infeasible",
}
WORDS = {status: status.replace("_", " ") for status in STATUSES}
PHASES = ("data", "forward", "backward", "optimizer", "communication")
_OF_THE_SWEEP = {"task", "name", "run_dir", "resume"}
"""Settings that are told otherwise, or belong to the sweep's own folder."""
_SHORT_NAMES = {
    "accumulation_steps": "accumulation",
    "parallel_strategy": "strategy",
    "batch_size": "batch",
    "global_batch_size": "global batch",
    "workers": "devices",
}


def title(record: SweepRecord) -> str:
    return one_line(f"{record.folder.resolve().name}", 80)


def setting_names(record: SweepRecord) -> list[str]:
    """Every setting of the space, in its order, and whatever else the points hold."""
    space = record.header.get("space")
    given = [str(name) for name in space] if isinstance(space, dict) else []
    return list(dict.fromkeys([*given, *(str(name) for row in record.rows for name in row.point)]))


def swept(record: SweepRecord) -> list[str]:
    """The settings that have two values or more among the trials."""
    values = {
        name: {point_key({name: row.point.get(name)}) for row in record.rows if name in row.point}
        for name in setting_names(record)
    }
    return [name for name, found in values.items() if len(found) > 1]


def other_swept(record: SweepRecord) -> list[str]:
    """Swept settings that no table has a column for already."""
    return [
        name for name in swept(record) if name not in (*PLANNED, "parallel_strategy") or name == "compile"
    ]


def in_words(name: str) -> str:
    return one_line(_SHORT_NAMES.get(name, name.replace("_", " ")), 40)


def value_text(value: Any) -> str:
    """A setting's value, short."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return one_line(",".join(map(value_text, value)), 40)
    return one_line(str(value), 40).replace("_parallel", " parallel")


def one_line(text: str, most: int = 300) -> str:
    """Printable text of one line, cut where it is too long."""
    clean = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def counts(rows: Iterable[TrialRow]) -> dict[str, int]:
    """How many trials ended how; only those that any did."""
    ends = [row.status for row in rows]
    return {status: ends.count(status) for status in STATUSES if status in ends}


def counts_text(rows: Iterable[TrialRow]) -> str:
    return ", ".join(f"{count} {WORDS[status]}" for status, count in counts(rows).items()) or "none yet"


def objective_name(record: SweepRecord) -> str:
    return "validation loss" if record.objective == "validation_loss" else "samples/s"


def objective_value(record: SweepRecord, row: TrialRow) -> float | None:
    """What people read as the outcome of a trial."""
    return finite(row.validation_loss) if record.objective == "validation_loss" else speed_of(row)


def objective_text(record: SweepRecord, value: float) -> str:
    return f"{value:.4g}" if record.objective == "validation_loss" else speed_text(value)


def speed_text(speed: float | None) -> str:
    if speed is None:
        return "–"
    return f"{speed:,.0f}" if 100 <= speed < 1e12 else f"{speed:.3g}"


def rate_text(row: TrialRow) -> str:
    """'1,234 ± 2.1%'."""
    speed, interval = speed_of(row), interval_of(row)
    return speed_text(speed) + (
        f" ± {100 * interval:.1f}%" if speed is not None and interval is not None else ""
    )


def hours_text(hours: float | None) -> str:
    return "–" if hours is None else seconds_text(3600 * hours)


def spent(record: SweepRecord) -> float:
    """Seconds of all trials together."""
    return sum(took for row in record.rows if (took := finite(row.seconds)) is not None and took > 0)


def space_text(record: SweepRecord) -> str:
    """'precision (fp32,bf16) × batch (16,64)', or '24 points of precision, batch' where just these were listed."""
    space, points = record.header.get("space"), record.header.get("points")
    if isinstance(points, list):
        return f"{plural(len(points), 'listed point', 'listed points')} of {', '.join(map(in_words, setting_names(record)))}"
    domains: Mapping[str, Any] = space if isinstance(space, dict) else {}
    parts = [
        f"{in_words(name)} ({one_line(str(domains[name]), 60)})" if name in domains else in_words(name)
        for name in setting_names(record)
    ]
    return " × ".join(parts) or "nothing"


def hardware_text(record: SweepRecord) -> str:
    """'8 GPUs (NVIDIA H200)', or what of it is known."""
    header = record.header
    kind, devices, name = (
        header.get("kind"),
        header.get("devices"),
        one_line(str(header.get("device_name") or ""), 60),
    )
    kinds = ("GPU", "GPUs") if kind == "gpu" else ("CPU device", "CPU devices")
    count = plural(devices, *kinds) if isinstance(devices, int) else kinds[1]
    cores = header.get("cores_per_worker")
    details = [
        name,
        f"{plural(cores, 'core', 'cores')} each" if kind != "gpu" and isinstance(cores, int) else "",
    ]
    beside = ", ".join(part for part in details if part)
    return f"{count} ({beside})" if beside else count


def trials_text(record: SweepRecord) -> str:
    """'24 trials', or how many of them there are so far."""
    planned, done = record.header.get("trials"), len(record.rows)
    if isinstance(planned, int) and planned > done:
        return f"{done} of {plural(planned, 'trial', 'trials')} so far"
    return plural(done, "trial", "trials")


def sentence(record: SweepRecord) -> str:
    """What was swept, on what, how it was measured, and how it went."""
    task, search = (
        one_line(str(record.header.get("task") or "unknown"), 80),
        one_line(str(record.header.get("search") or "unknown"), 20),
    )
    return (
        f"Task {task} on {hardware_text(record)}: swept {space_text(record)} by {search} search for the best {objective_name(record)}; "
        f"{trials_text(record)}: {counts_text(record.rows)}. Throughput is measured after warm-up, which is left out; "
        "± is half the width of its 95% confidence interval (none where a trial was too short for one)."
    )


def train_command(record: SweepRecord, row: TrialRow) -> str:
    """The command that trains with a row's settings: those given to the sweep, and over them the trial's own. Objects of a Python
    program have no name that a command line could give; there it is a line of Python."""
    given = record.header.get("settings")
    settings = (dict(given) if isinstance(given, dict) else {}) | dict(row.point)
    known = {
        name: value
        for name, value in settings.items()
        if name in setting_types() and name not in _OF_THE_SWEEP
    }
    devices = devices_of(row)
    if devices is not None and known.get("workers") in (None, "auto"):
        known["workers"] = devices
    if in_python(record):
        return f"Trainer(…, config=Config.of({', '.join(f'{name}={value!r}' for name, value in known.items())})).fit()"
    return shlex.join(
        ["orchestrator", "train", "--task", str(record.header.get("task") or "digits"), *point_flags(known)]
    )


def in_python(record: SweepRecord) -> bool:
    """Whether the task was an object of a Python program."""
    return str(record.header.get("task")).startswith("python:")


def tuned_command(record: SweepRecord) -> str:
    return shlex.join(["orchestrator", "train", "--tuned", str(record.folder)])


def setting_text(row: TrialRow, names: Iterable[str]) -> str:
    """'precision bf16, batch 64': what a row has of some settings."""
    return ", ".join(f"{in_words(name)} {value_text(row.point[name])}" for name in names if name in row.point)


def series_label(series: Series, among: Iterable[Series]) -> str:
    """What sets a series apart from the others that are shown."""
    others = list(among)
    names = list(dict.fromkeys(name for other in others for name in other.settings))
    differ = [
        name for name in names if len({point_key({name: other.settings.get(name)}) for other in others}) > 1
    ]
    shown = differ or [
        name for name in ("batch_size", "accumulation_steps", "global_batch_size") if name in series.settings
    ]
    parts = [_named(name, series.settings[name]) for name in shown if name in series.settings] or [
        "all alike"
    ]
    return ", ".join(parts if series.base_devices == 1 else [*parts, f"from {series.base_devices} devices"])


def _named(name: str, value: Any) -> str:
    bare = name in ("precision", "strategy")
    return value_text(value) if bare else f"{in_words(name)} {value_text(value)}"


def point_text(row: TrialRow, name: str) -> str:
    """What a trial asked for, and what the plan made of it where that is something else."""
    asked, filled = (
        row.point.get(name),
        settings_of(row).get("strategy" if name == "parallel_strategy" else name),
    )
    if name not in row.point:
        return value_text(filled) if filled is not None else "–"
    same = filled is None or value_text(filled) == value_text(asked)
    return value_text(asked) if same else f"{value_text(asked)} → {value_text(filled)}"
