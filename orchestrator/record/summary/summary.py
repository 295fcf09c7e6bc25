"""The outcome of a run in one object, from its events alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import Event
from orchestrator.record.events.sessions import (
    by_step,
    last_end,
    last_of,
    of_type,
    recovery_starts,
    split_sessions,
)
from orchestrator.record.experts.expert_changes import change_counts, expert_changes, final_num_experts
from orchestrator.record.experts.host_balance import mean_per_step, settled_imbalance
from orchestrator.record.files.event_log import without_nan
from orchestrator.record.summary.fold import RunFold, fold_events
from orchestrator.record.summary.speed import after_warm_up
from orchestrator.record.summary.totals import Totals
from orchestrator.storage.local_files import write_whole


def summarise(recorded: Iterable[Event]) -> dict[str, Any]:
    """Return the fields of ``summary.json`` from all events of a run."""
    return summary_of(fold_events(recorded))


def summary_of(fold: RunFold) -> dict[str, Any]:
    """Return the fields of ``summary.json``."""
    recorded = fold.events()
    totals = fold.totals
    events = effective_events(recorded)
    start = last_of(events, kinds.Start) or kinds.Start()
    last_step = last_of(events, kinds.Step)
    loads = by_step(events, kinds.Load)
    exchanges = after_warm_up(by_step(events, kinds.Exchange))
    speed = totals.speed.speed()
    changes = expert_changes(events)
    final = _final(recorded)
    peak = totals.peak.peak()
    # The order of the keys is the order in the file.
    summary = {
        **_ending(recorded),
        "task": start.task,
        "strategy": start.strategy,
        "workers": _workers(events),
        "device": start.device,
        "precision": start.precision,
        "global_batch_size": start.global_batch_size,
        "parameters": start.parameters,
        "unit": start.unit,
        "steps": last_step.step if last_step else 0,
        "epochs": totals.num_epochs,
        "samples_per_second": speed.samples if speed else None,
        "units_per_second": speed.units if speed else None,
        "median_step_seconds": speed.median_step_s if speed else None,
        "mean_step_seconds": speed.mean_step_s if speed else None,
        "warm_up_steps": speed.num_warm_up if speed else 0,
        "train_loss": last_step.loss if last_step else None,
        "bad_samples": totals.bad_samples,
        **_validation(events, final),
        "peak_memory_bytes": peak.allocated if peak else None,
        "memory_parts": dict(peak.parts) if peak else {},
        "uploaded_step": totals.uploaded_step,
        "final": {"step": final.step, "weights": final.weights, "reason": final.reason} if final else {},
        "experts": final_num_experts(changes, loads, final.step if final else None),
        "expert_changes": change_counts(changes),
        "imbalance": settled_imbalance(events, loads),
        "exchange_bytes_per_step": mean_per_step(exchanges, "bytes"),
        "exchange_seconds_per_step": mean_per_step(exchanges, "seconds"),
        **_interruptions(events, totals),
        "seconds": sum(_seconds(session) for session in split_sessions(recorded)),
    }
    return without_nan(summary)


def _ending(recorded: Sequence[Event]) -> dict[str, Any]:
    end = last_end(split_sessions(recorded))
    if end is None:
        return {"status": "killed", "reason": "the process ended without an end event"}
    return {"status": end.status, "reason": end.reason}


def _workers(events: Sequence[Event]) -> int | None:
    """Return the number of workers at the end of the run."""
    recorded = [event.workers for event in events if isinstance(event, kinds.Start | kinds.Recovery)]
    return next((workers for workers in reversed(recorded) if workers), None)


def _final(recorded: Sequence[Event]) -> kinds.Final | None:
    """Return the step whose weights the run ended with, and why; None if it did not end."""
    last_session = split_sessions(recorded)[-1:]
    return last_of(last_session[0], kinds.Final) if last_session else None


def best_evaluation(events: Sequence[Event]) -> kinds.Evaluation | None:
    """Return the last evaluation that was the best so far when it was made, of the events that count."""
    return next((event for event in reversed(by_step(events, kinds.Evaluation)) if event.best), None)


def metric_of_best(events: Sequence[Event]) -> str:
    """Return the metric by which evaluations of a run are the best."""
    start = last_of(events, kinds.Start)
    return str(start.best_by if start is not None else None).partition(":")[0]


def _validation(events: Sequence[Event], final: kinds.Final | None) -> dict[str, Any]:
    """Return the evaluations of the final weights (of the newest ones in a run without), of the last step
    that was evaluated, and of the best one."""
    evaluations = by_step(events, kinds.Evaluation)
    last = evaluations[-1] if evaluations else None
    of_final = [event for event in evaluations if final is not None and event.step == final.step]
    shown = of_final[-1] if of_final else last
    return {
        "validation": {"loss": shown.loss, **shown.metrics} if shown else {},
        "last": _with_step(last),
        "best": _with_step(best_evaluation(events)),
    }


def _with_step(evaluation: kinds.Evaluation | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    return {"step": evaluation.step, "loss": evaluation.loss, **evaluation.metrics}


def _interruptions(events: Sequence[Event], totals: Totals) -> dict[str, Any]:
    """Return failures, recoveries, lost steps and goodput: the time of effective steps over all
    time spent."""
    recoveries = of_type(events, kinds.Recovery)
    # A start that belongs to a recovery is the same interruption.
    num_resumes = max(0, len(of_type(events, kinds.Start)) - 1 - len(recovery_starts(events)))
    num_replayed = totals.num_recorded_steps - totals.num_steps
    spent_seconds = totals.recorded_step_seconds + sum(event.total_seconds or 0.0 for event in recoveries)
    return {
        "failures": len(of_type(events, kinds.Failure)),
        "recoveries": len(recoveries) + len(of_type(events, kinds.OutOfMemory)) + num_resumes,
        # A killed writer may have lost lines that the recovery counted.
        "lost_steps": max(num_replayed, sum(event.lost_steps or 0 for event in recoveries)),
        "goodput": totals.step_seconds / spent_seconds if spent_seconds else None,
    }


def _seconds(session: Sequence[Event]) -> float:
    """Return the time from the first start to the last event, which includes processes without an
    end event.

    Clocks of nodes may be wrong. So it is at most the time that the process has measured which the user
    started."""
    times = [event.time for event in session if event.time is not None]
    recorded = sum(end.seconds or 0.0 for end in of_type(session, kinds.End))
    measured = [event.seconds for event in of_type(session, kinds.Final) if event.seconds is not None]
    span = max(times) - min(times) if times else 0.0
    return max(recorded, min([span, *measured]))


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2, default=str))
