"""The plan of a run in its folder: written at each start, read by a later start."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.writer import flat_values, to_json, write_file
from orchestrator.errors import UserError
from orchestrator.record.events.kinds import Load, decode_event
from orchestrator.record.experts.host_balance import token_counts
from orchestrator.record.files.reading import last_events
from orchestrator.record.summary.summary import write_json
from orchestrator.redaction import Secrets, mask_tree
from orchestrator.run.prepared_run import PreparedRun, plan_json
from orchestrator.run.run_dir import given_location
from orchestrator.storage.local_files import read_regular

CONFIG = "config.yaml"
START_ONLY = frozenset({"resume", "run_dir", "name", "init_from"})
"""Settings that say where one start begins and writes: no difference between two starts of a run."""

_MAX_COUNT = 2**48  # more samples or tokens than a run can have counted
_DAMAGE_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that a missing or damaged plan may raise."""


def write_config_and_plan(prepared: PreparedRun, run_dir: Path, measured: dict[str, Any]) -> None:
    """Write ``config.yaml`` and ``plan.json`` without secrets.

    ``measured`` is what only the workers could find."""
    secrets = prepared.hidden
    prepared = replace(prepared, resolved=_with_addresses(prepared.resolved))
    _write_config(prepared.resolved, run_dir, secrets)
    content = mask_tree(plan_json(prepared) | {"measured": measured}, secrets, keys=False)
    write_json(run_dir / "plan.json", content)


def _with_addresses(resolved: Resolved) -> Resolved:
    """Return the settings with the addresses that were given in place of the run's copies of them."""
    settings = resolved.config.checkpoint
    given = {name: getattr(settings, name) for name in ("resume", "init_from")}
    named = {
        name: given_location(Path(value)) for name, value in given.items() if value not in (None, "auto")
    }
    return Resolved(resolved.config.but(**named), resolved.origins)


def _write_config(resolved: Resolved, run_dir: Path, secrets: Secrets) -> None:
    """Write ``config.yaml``. An earlier one with other settings stays as ``config.001.yaml``."""
    path = run_dir / CONFIG
    if path.is_file():
        if _holds_settings(path, resolved.config, secrets):
            return
        os.rename(path, _next_free(run_dir))
    write_file(resolved, path, secrets=secrets)


def _holds_settings(path: Path, config: Config, secrets: Secrets) -> bool:
    try:
        written = flat_values(read_file(path).config)
    except UserError:
        return False
    now = mask_tree(flat_values(config), secrets, keys=False)
    return all(written[name] == now[name] for name in flat_names() if name not in START_ONLY)


def _next_free(run_dir: Path) -> Path:
    numbers = range(1, 10**6)
    candidates = (run_dir / f"config.{number:03d}.yaml" for number in numbers)
    return next(path for path in candidates if not path.exists())


def read_earlier_plan(run_dir: Path) -> dict[str, Any]:
    """Return what an earlier start of this run chose or measured, and a later one keeps.

    The keys are ``batch_size``, ``global_batch_size``, ``eval_batch_size``, ``workers``,
    ``device_speeds``, the ``placement`` of experts with the request and the hosts it was made for,
    ``halvings``, the failures for lack of memory after which the batch was measured, and ``asked``: the batch
    settings of that start. Empty if there is no plan, or if it is damaged."""
    try:
        return _values_to_keep(json.loads(read_regular(run_dir / "plan.json")))
    except _DAMAGE_ERRORS:
        return {}


def _values_to_keep(saved: dict[str, Any]) -> dict[str, Any]:
    choices = saved["choices"]
    batch_size = int(choices["batch_size"]["value"])
    global_batch_size = int(choices["global_batch_size"]["value"])
    eval_batch_size = int(choices["eval_batch_size"]["value"])
    measured = saved.get("measured", {})
    speeds: dict[str, float] = {}
    for name, speed in measured.get("device_speeds", {}).items():
        speeds[str(name)] = float(speed)
    # The file may have been edited: numbers that no run could have chosen are not used.
    sizes = (batch_size, global_batch_size, eval_batch_size)
    if not all(1 <= size < _MAX_COUNT for size in sizes):
        return {}
    if not all(0 < speed < math.inf for speed in speeds.values()):
        return {}
    batch_settings = [entry for entry in saved["settings"] if entry["name"].startswith("batch.")]
    return {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "eval_batch_size": eval_batch_size,
        "workers": int(choices["workers"]["value"]),
        "device_speeds": speeds,
        "asked": {entry["name"]: entry["value"] for entry in batch_settings},
        "halvings": int(measured.get("halvings", 0)),
        "placement": measured.get("placement"),
        "placement_asked": measured.get("placement_asked"),
        "placement_hosts": measured.get("placement_hosts"),
    }


def read_earlier_model(run_dir: Path) -> dict[str, Any]:
    """Return the facts of the model that an earlier start trained. Empty if its plan is damaged."""
    try:
        return dict(json.loads(read_regular(run_dir / "plan.json"))["model"])
    except _DAMAGE_ERRORS:
        return {}


def read_last_expert_loads(run_dir: Path) -> list[dict[str, float]] | None:
    """Return the tokens per expert of each layer that an earlier start recorded last, if any.

    They are keyed by the expert's id, as text: JSON has no other keys."""
    events = map(decode_event, reversed(last_events(run_dir / "events.jsonl")))
    load = next((event for event in events if isinstance(event, Load)), None)
    if load is None or any(count is None or count >= _MAX_COUNT for layer in load.loads for count in layer):
        return None
    return [{str(expert): count for expert, count in layer.items()} for layer in token_counts(load)] or None


def earlier_global_batch(config: Config, earlier_plan: dict[str, Any]) -> dict[str, int]:
    """Return the global batch of an earlier start, unless this start has other batch settings.

    So the global batch stays the same on another number of workers."""
    asked = {f"batch.{name}": value for name, value in to_json(config)["batch"].items()}
    has_same_settings = earlier_plan.get("asked") == asked
    if "global_batch_size" not in earlier_plan or not has_same_settings or config.run.debug:
        return {}
    return {"global_batch_size": earlier_plan["global_batch_size"]}
