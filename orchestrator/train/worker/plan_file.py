"""The plan of a run in its folder: written at each start, and read by a later one that continues the run."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.config.writer import to_json, write_file
from orchestrator.record.events import last_events, of_kind
from orchestrator.record.summary import write_json
from orchestrator.redaction import mask_tree
from orchestrator.train.worker.prepared_run import PreparedRun, plan_json

_MAX_COUNT = 2**48  # more samples or tokens than a run can have counted


def write_config_and_plan(prepared: PreparedRun, run_dir: Path, measured: dict[str, Any]) -> None:
    """Write ``config.yaml`` and ``plan.json`` without secrets. ``measured`` is what only the workers could find."""
    secrets = prepared.hidden
    write_file(prepared.resolved, run_dir / "config.yaml", secrets=secrets)
    content = mask_tree(plan_json(prepared) | {"measured": measured}, secrets, keys=False)
    write_json(run_dir / "plan.json", content)


def read_earlier_plan(run_dir: Path) -> dict[str, Any]:
    """Return what an earlier start of this run chose or measured, and a later one keeps.

    The keys are ``batch_size``, ``global_batch_size``, ``device_speeds``, the ``placement`` of experts with the
    request and the hosts it was made for, and ``asked``: the batch settings of that start. Empty if there is no plan,
    or if it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        saved = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
        sizes = {name: int(saved["choices"][name]["value"]) for name in ("batch_size", "global_batch_size")}
        measured = saved.get("measured", {})
        speeds = {str(name): float(speed) for name, speed in measured.get("device_speeds", {}).items()}
        if not all(1 <= size < _MAX_COUNT for size in sizes.values()):
            return {}
        if not all(0 < speed < math.inf for speed in speeds.values()):
            return {}
        placement_keys = ("placement", "placement_asked", "placement_hosts")
        placement = {name: measured.get(name) for name in placement_keys}
        settings = [entry for entry in saved["settings"] if entry["name"].startswith("batch.")]
        asked = {entry["name"]: entry["value"] for entry in settings}
        return sizes | {"device_speeds": speeds, "asked": asked} | placement
    return {}


def read_last_expert_loads(run_dir: Path) -> list[list[float]] | None:
    """Return the tokens per layer and expert that an earlier start of this run recorded last, if any."""
    events = of_kind(last_events(run_dir / "events.jsonl"), "load")
    if not events:
        return None
    with suppress(ValueError, TypeError, KeyError, OverflowError):
        loads = [[float(count) for count in layer] for layer in events[-1]["loads"]]
        is_plausible = all(0 <= count < _MAX_COUNT for layer in loads for count in layer)
        return loads if loads and is_plausible else None
    return None


def earlier_global_batch(config: Config, earlier_plan: dict[str, Any]) -> dict[str, int]:
    """Return the global batch of an earlier start, unless this start has other batch settings.

    So the global batch stays the same on another number of workers."""
    asked = {f"batch.{name}": value for name, value in to_json(config)["batch"].items()}
    if "global_batch_size" not in earlier_plan or earlier_plan.get("asked") != asked or config.run.debug:
        return {}
    return {"global_batch_size": earlier_plan["global_batch_size"]}
