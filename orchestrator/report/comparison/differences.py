"""Differences between runs: settings, choices of the plan, hardware, versions and commits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.record.events.decoding import finite
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.run.figures.read import entries, section
from orchestrator.report.run.figures.stats import device_name
from orchestrator.types import bytes_text

MISSING = "–"


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same in all runs: its value in each, in their order."""

    name: str
    values: tuple[Any, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(map(_text, self.values))


def setting_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the settings that differ, then the choices of the plan that differ although their
    settings are equal."""
    settings = _differing([run.settings for run in runs])
    named = {difference.name.rpartition(".")[2] for difference in settings}
    choices = [
        Difference(f"plan: {difference.name}", difference.values)
        for difference in _differing([_choices(run) for run in runs])
        if difference.name not in named
    ]
    return settings + choices


def environment_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the facts of hardware, software and code that differ."""
    return _differing([environment(run) for run in runs])


def environment(run: ComparedRun) -> dict[str, Any]:
    """Return what a run was computed on, and by which code."""
    record = run.record
    hardware = section(record.plan, "hardware")
    ram = finite(hardware.get("ram_total", hardware.get("ram")))
    gpus = [str(gpu.get("name")) for gpu in entries(hardware, "gpus")]
    facts = {
        "device": device_name(record) or None,
        "CPU": hardware.get("cpu_name"),
        "cores": hardware.get("cores"),
        "memory": bytes_text(ram) if ram is not None else None,
        "GPUs": f"{len(gpus)} × {', '.join(dict.fromkeys(gpus))}" if gpus else None,
        "driver": hardware.get("driver"),
        "workers": record.workers,
        "backend": record.start.backend,
        "expert-orchestrator": record.start.version,
        "torch": hardware.get("torch"),
        "commit": hardware.get("commit"),
    }
    return facts | section(hardware, "versions")


def _choices(run: ComparedRun) -> dict[str, Any]:
    choices = section(run.record.plan, "choices")
    return {name: section(choices, name).get("value") for name in choices}


def _differing(facts: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the facts whose values are not all equal, in order of appearance."""
    names = dict.fromkeys(name for mapping in facts for name in mapping)
    differences = [Difference(name, tuple(mapping.get(name) for mapping in facts)) for name in names]
    return [difference for difference in differences if len(set(difference.texts)) > 1]


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
