"""The runs of a comparison: read from their folders, checked, and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.config.writer import to_json
from orchestrator.errors import UserError
from orchestrator.record.files.ledger import holds_sweep
from orchestrator.report.run.figures.read import RunRecord, read_run_record, section
from orchestrator.storage.address import location_text

MAX_RUNS = 18
"""Runs that colours and dashes can tell apart: six colours, each solid, dashed and dotted."""
NOT_COMPARED = frozenset({"run.name", "run.run_dir", "resume.resume", "parallel.ray_address"})
"""Settings that say where a run is recorded, not how it trains."""
SEED = "run.seed"


@dataclass(frozen=True)
class ComparedRun:
    """A run with the label under which tables and curves show it."""

    label: str
    location: str
    record: RunRecord

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by name, ``optim.learning_rate``, without those that are not compared.

        A setting that the run's version did not have yet is at its default."""
        known = _default_settings() | _flat(self.record.config)
        return {name: value for name, value in known.items() if name not in NOT_COMPARED}

    @property
    def seed(self) -> Any:
        return self.settings.get(SEED)

    @property
    def is_complete(self) -> bool:
        return self.record.status == "completed"

    @property
    def last_step(self) -> int:
        return self.record.steps[-1].step if self.record.steps else 0


@cache
def _default_settings() -> dict[str, Any]:
    return _flat(to_json(Config()))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def read_runs(folders: Sequence[tuple[str | Path, Path]]) -> list[ComparedRun]:
    """Read the runs from (location, local folder) pairs; UserError if they cannot be compared."""
    _check_locations([location_text(location) for location, _ in folders])
    runs = []
    for location, local in folders:
        place = location_text(location)
        if holds_sweep(local):
            raise UserError(
                f"{place} is the folder of a sweep; a comparison needs runs.\n"
                f"Draw its report, which compares its trials, with: orchestrator report {place}"
            )
        record = read_run_record(local)
        name = section(record.config, "run").get("name") or place.rstrip("/").rpartition("/")[2]
        runs.append(ComparedRun(str(name), place, record))
    _check_tasks(runs)
    return _with_unique_labels(runs)


def _check_locations(places: Sequence[str]) -> None:
    if len(places) > MAX_RUNS:
        raise UserError(
            f"{len(places)} runs were given; a comparison shows at most {MAX_RUNS}. Leave some out, or "
            "compare settings with: orchestrator sweep"
        )
    twice = [place for place, count in Counter(place.rstrip("/") for place in places).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} was given twice; give each run once")


def _check_tasks(runs: Sequence[ComparedRun]) -> None:
    tasks = {run.location: str(run.record.fact("task")) for run in runs}
    if len(set(tasks.values())) > 1:
        found = ", ".join(f"{place} trains {task}" for place, task in tasks.items())
        raise UserError(
            f"{found}: losses and metrics of different tasks mean different things.\n"
            "Compare runs of one task; each run alone has its own report."
        )


def _with_unique_labels(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs with their names as labels; those with a common name are shown by their folder."""
    names = Counter(run.label for run in runs)
    return [run if names[run.label] == 1 else replace(run, label=run.location) for run in runs]
