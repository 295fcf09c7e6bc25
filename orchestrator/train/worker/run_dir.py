"""The run folder: made, filled with what was intended, and closed with what came of it."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from orchestrator.config.outputs import Tracker
from orchestrator.config.reader import Resolved
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.writer import to_json, write_file
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory, secret_values
from orchestrator.plan.planning import Plan
from orchestrator.record.events import last_events, of_kind, read_events
from orchestrator.record.summary import summarise, write_json
from orchestrator.redaction import Secrets, longest_first, mask_tree, secrets_in
from orchestrator.tasks.task import Task
from orchestrator.types import count_text

_MOST = 2**48  # samples or tokens that a record may speak of


@dataclass(frozen=True)
class PreparedRun:
    """A run before it starts: what was asked, what was found, what was chosen."""

    resolved: Resolved
    task: Task
    inventory: Inventory
    facts: ModelFacts
    plan: Plan
    cluster: Cluster | None = None
    in_cluster: bool = False
    secrets: Secrets = field(default=(), repr=False)
    """Of whoever asked for the run: the node of a worker need not have them in its environment."""

    def with_secrets(self) -> PreparedRun:
        """To be sent to others, with those secrets of this environment that they are handed anyway: in its own settings and reasons."""
        return replace(self, secrets=secrets_in(plan_json(self), secret_values()))

    @property
    def hidden(self) -> Secrets:
        """What is masked in all that the run says: secrets of who asked for it, and of where its worker is."""
        return longest_first(self.secrets, secret_values())


def open_run_dir(config: Config, name: str | None, results: Path) -> Path:
    """The folder of the run, made and writable. A folder that holds a run already is continued only when asked for."""
    run_dir = config.run.run_dir or _named(config, name, results)
    check_unused(config, run_dir)
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        mark = run_dir / ".writable"
        mark.touch()
        mark.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to the run folder {run_dir}: {error.strerror}; choose another with --run-dir"
        ) from None
    return run_dir


def check_unused(config: Config, run_dir: Path | None) -> None:
    """Refuse a folder that holds a run, unless that is to be continued."""
    if run_dir is None:
        return
    check_links(run_dir)
    if config.checkpoint.resume is None and of_kind(read_events(run_dir / "events.jsonl"), "start"):
        raise UserError(
            f"{run_dir} holds a run already; continue it with --resume auto, or choose another --run-dir or --name"
        )


def check_links(folder: Path) -> None:
    """Refuse a folder that was handed to us with links in it which lead out of it: we would write elsewhere. So with pipes and
    devices, which have no end, and with folders in the place of files."""
    inside, trackers = os.path.realpath(folder), [folder / name for name in get_args(Tracker)]
    for place in (folder, folder / "checkpoints", folder / "logs", *trackers):
        for path in place.iterdir() if place.is_dir() else ():
            target = Path(os.path.realpath(path))
            there = (
                target.exists() or place in trackers
            )  # they leave links of their own to what may be gone by now
            if path.is_symlink() and not (target.is_relative_to(inside) and there):
                raise UserError(
                    f"{path} is a link to {target}, outside the folder or not there; a run writes into its own folder alone. "
                    "Remove the link, or give another --run-dir (which may be a link itself)"
                )
            if path.exists() and not path.is_file() and (not path.is_dir() or path.suffix in _SUFFIXES):
                raise UserError(
                    f"{path} is no file, and no folder of a run; remove it, or give another --run-dir"
                )


_SUFFIXES = frozenset({".jsonl", ".json", ".yaml", ".html", ".txt", ".png", ".log"})


def find_run_to_resume(config: Config, name: str | None, results: Path) -> Path | None:
    """The folder of the run that is to be continued, if there is one."""
    run_dir = (
        (config.run.run_dir or _named(config, name, results)) if config.checkpoint.resume == "auto" else None
    )
    if run_dir is None or not run_dir.is_dir():
        return None
    check_links(run_dir)
    return run_dir


def task_name(config: Config) -> str:
    """The task as part of a folder's name: a class may be called anything."""
    return re.sub(r"[^\w-]", "_", config.task.rpartition(":")[2].lower(), flags=re.ASCII)[:60]


def _named(config: Config, name: str | None, results: Path) -> Path:
    if name:
        return results / name
    task = task_name(config)
    if config.checkpoint.resume == "auto":
        stamped = re.compile(rf"{re.escape(task)}-\d{{8}}-\d{{6}}(-\d+)?")
        earlier = sorted(
            path.parent for path in results.glob("*/events.jsonl") if stamped.fullmatch(path.parent.name)
        )
        if earlier:
            return earlier[-1]
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    free = (results / f"{task}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in free if not path.exists())


def write_config_and_plan(prepared: PreparedRun, run_dir: Path, measured: dict[str, Any]) -> None:
    """``config.yaml`` and ``plan.json``, without secrets."""
    secrets = prepared.hidden
    write_file(prepared.resolved, run_dir / "config.yaml", secrets=secrets)
    write_json(
        run_dir / "plan.json", mask_tree(plan_json(prepared) | {"measured": measured}, secrets, keys=False)
    )


def plan_json(prepared: PreparedRun) -> dict[str, Any]:
    """The plan with the settings and hardware it was made from."""
    values = to_json(prepared.resolved.config)
    settings = [
        {
            "name": f"{section}.{name}" if section else name,
            "value": values[section][name] if section else values[name],
            "origin": prepared.resolved.origin(name),
        }
        for name, section in flat_names().items()
    ]
    facts = {k: getattr(prepared.facts, k) for k in prepared.facts.__dataclass_fields__}
    return {
        **prepared.plan.to_json(),
        "settings": settings,
        "hardware": prepared.inventory.to_json(),
        "model": facts,
    }


def read_earlier_plan(run_dir: Path) -> dict[str, Any]:
    """What an earlier start of this run chose or measured, and a later one keeps: ``batch_size``, ``global_batch_size`` and
    ``device_speeds`` and ``placement``; with them the settings they were asked for by. Empty where there is no plan, or it is
    damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        saved = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
        known = {name: int(saved["choices"][name]["value"]) for name in ("batch_size", "global_batch_size")}
        measured = saved.get("measured", {})
        speeds = {str(name): float(speed) for name, speed in measured.get("device_speeds", {}).items()}
        if not all(1 <= size < _MOST for size in known.values()) or not all(
            0 < speed < math.inf for speed in speeds.values()
        ):
            return {}  # figures that no run chose
        placed = {name: measured.get(name) for name in ("placement", "placement_asked", "placement_hosts")}
        asked = {
            entry["name"]: entry["value"] for entry in saved["settings"] if entry["name"].startswith("batch.")
        }
        return known | {"device_speeds": speeds, "asked": asked} | placed
    return {}


def read_last_expert_loads(run_dir: Path) -> list[list[float]] | None:
    """Tokens per expert and layer, as an earlier start of this run last counted them."""
    events = of_kind(last_events(run_dir / "events.jsonl"), "load")
    with suppress(ValueError, TypeError, KeyError, OverflowError):
        loads = [[float(count) for count in layer] for layer in events[-1]["loads"]] if events else []
        return loads if loads and all(0 <= count < _MOST for layer in loads for count in layer) else None
    return None


def earlier_global_batch(config: Config, known: dict[str, Any]) -> dict[str, int]:
    """The global batch of an earlier start of this run, where nothing else is asked for now: it stays the same on another
    number of workers."""
    asked = {f"batch.{name}": value for name, value in to_json(config)["batch"].items()}
    kept = "global_batch_size" in known and known.get("asked") == asked and not config.run.debug
    return {"global_batch_size": known["global_batch_size"]} if kept else {}


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Write ``summary.json`` from the events."""
    summary = summarise(read_events(run_dir / "events.jsonl"))
    write_json(run_dir / "summary.json", summary)
    return summary


def summary_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """How a run ended, in two lines."""

    def shown(values: dict[str, Any]) -> str:
        return ", ".join(f"{name} {float(value):.4f}" for name, value in values.items() if name != "step")

    parts = [f"{summary['steps']} steps ({summary['reason']})"]
    if summary["validation"]:
        parts.append(f"validation {shown(summary['validation'])}")
        best = summary["best"]
        if best and best["step"] != summary["steps"]:
            parts.append(f"best at step {best['step']}: {shown(best)}")
    elif summary["train_loss"] is not None:
        parts.append(f"training loss {float(summary['train_loss']):.4f}")
    rate, units = summary["samples_per_second"], summary["units_per_second"]
    if rate:
        parts.append(
            f"{rate:,.0f} samples/s" + (f" ({units:,.0f} {summary['unit']}/s)" if units != rate else "")
        )
    return [f"{summary['status']}: {', '.join(parts)}", f"report: {run_dir / 'report.html'}"]


def _relation(chosen: Plan) -> str:
    """A global batch that does not divide is cut as evenly as can be."""
    product = chosen.batch_size.value * chosen.accumulation_steps.value * chosen.data_ranks
    return "=" if product == chosen.global_batch_size.value else "at most, for"


def banner_rows(prepared: PreparedRun, run_dir: Path) -> list[tuple[str, str]]:
    """The start-up banner: processes, strategy, precision, accumulation, devices."""
    chosen, facts = prepared.plan, prepared.facts
    experts = f", {facts.experts} experts in {facts.moe_layers} layers" if facts.experts else ""
    workers, holders = chosen.workers.value, chosen.data_ranks
    product = f"{chosen.batch_size.value} × {chosen.accumulation_steps.value} accumulation × {holders} worker{'s' * (holders > 1)}"
    processes = "1 (strategy: single device)"
    if chosen.strategy.value != "single":
        detail = f", {chosen.sharding.value}" if chosen.sharding.value != "none" else ""
        processes = f"{workers} (strategy: {chosen.strategy.value}, {chosen.backend.value}{detail}): {chosen.workers.reason}"
    return [
        ("task", f"{prepared.resolved.config.task} ({count_text(facts.parameters)} parameters{experts})"),
        ("data", f"{facts.samples} training and {facts.validation_samples} validation samples"),
        ("processes", processes),
        ("device", f"{chosen.device.value}: {chosen.device.reason}"),
        ("precision", f"{chosen.precision.value}: {chosen.precision.reason}"),
        ("batch", f"{product} {_relation(chosen)} {chosen.global_batch_size.value}"),
        ("steps", f"{chosen.total_steps.value}: {chosen.total_steps.reason}"),
        ("folder", str(run_dir)),
    ]
