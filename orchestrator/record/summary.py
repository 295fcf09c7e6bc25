"""The outcome of a run in one object, from its events alone: what was not recorded is not claimed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.record.events import Event, by_step, of_kind, effective_events, recovery_starts, split_sessions
from orchestrator.record.host_balance import mean_per_step, settled_imbalance
from orchestrator.record.validate import is_valid


def summarise(recorded: Sequence[Event]) -> dict[str, Any]:
    """The fields of ``summary.json``."""
    recorded = [event for event in recorded if is_valid(event)]
    events = effective_events(recorded)
    starts, ends, recoveries = of_kind(events, "start"), of_kind(events, "end"), of_kind(events, "recovery")
    last_end = next(iter(of_kind(split_sessions(recorded)[-1], "end")[-1:]), None) if recorded else None
    start: Event = starts[-1] if starts else {"event": "start"}
    steps, evaluations, exchanges = (by_step(events, kind) for kind in ("step", "evaluate", "exchange"))
    useful = sum(step["seconds"] for step in steps)
    spent = sum(step["seconds"] for step in of_kind(recorded, "step")) + _total(recoveries, "total_seconds")
    repeated = len(of_kind(recorded, "step")) - len(steps)
    last = evaluations[-1] if evaluations else None
    best = _best(evaluations)
    return {
        "status": last_end["status"] if last_end else "killed",
        "reason": last_end["reason"] if last_end else "the process ended without a word",
        **{key: start.get(key) for key in ("task", "strategy")},
        "workers": next(
            (
                event["workers"]
                for event in reversed(events)
                if event["event"] in _PLACED and event.get("workers")
            ),
            None,
        ),
        **{key: start.get(key) for key in ("device", "precision", "global_batch_size", "parameters", "unit")},
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": len({event["epoch"] for event in of_kind(events, "epoch")}),
        "samples_per_second": _rate(steps, "samples"),
        "units_per_second": _rate(steps, "units"),
        "train_loss": steps[-1]["loss"] if steps else None,
        "validation": {"loss": last["loss"], **last["metrics"]} if last else {},
        "best": {"step": best["step"], "loss": best["loss"], **best["metrics"]} if best else {},
        "peak_memory_bytes": max(
            (e["memory"]["allocated"] for e in [*of_kind(events, "epoch"), *ends] if "memory" in e),
            default=None,
        ),
        "imbalance": settled_imbalance(events, by_step(events, "load")),
        "exchange_bytes_per_step": mean_per_step(exchanges, "bytes"),
        "exchange_seconds_per_step": mean_per_step(exchanges, "seconds"),
        "failures": len(of_kind(events, "failure")),
        # The workers' restart that a recovery tells of is no other one.
        "recoveries": len(recoveries)
        + len(of_kind(events, "oom"))
        + max(0, len(starts) - 1 - len(recovery_starts(events))),
        # A killed writer may have lost lines that the recovery knows of.
        "lost_steps": max(repeated, round(_total(recoveries, "lost_steps"))),
        "goodput": useful / spent if spent else None,
        "seconds": sum(_seconds(sitting) for sitting in split_sessions(recorded)),
    }


_PLACED = ("start", "recovery")


def _total(events: Sequence[Event], name: str) -> float:
    return sum(event.get(name) or 0 for event in events)


def _seconds(sitting: Sequence[Event]) -> float:
    """From the first start to the last word; the processes that told no end are in it."""
    times = [event["time"] for event in sitting if isinstance(event.get("time"), int | float)]
    told = sum(end.get("seconds") or 0.0 for end in of_kind(sitting, "end"))
    return max(told, max(times) - min(times) if times else 0.0)


def _best(evaluations: Sequence[Event]) -> Event | None:
    """The last evaluation that was the best so far when it was made."""
    return next((event for event in reversed(evaluations) if event.get("best")), None)


def _rate(steps: Sequence[Event], what: str) -> float | None:
    """Per second over the run, the first steps of each process left out where there are others."""
    counted = [step for step in steps if not step.get("warm_up")] or steps
    seconds = sum(step["seconds"] for step in counted)
    return sum(step[what] for step in counted) / seconds if seconds else None


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(f".{path.name}.writing")
    beside.unlink(missing_ok=True)
    with beside.open("x", encoding="utf-8") as file:  # never through a link that lies in wait under that name
        json.dump(content, file, indent=2, default=str)
    os.replace(beside, path)
