"""``plan --what-fits``: the ladder of configurations, from the given one to those with the least memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from orchestrator.cli.tables import make_table, print_json, print_line, wide_console
from orchestrator.plan.ladder import (
    MOST_TOKENS,
    PlanRequest,
    Rung,
    fitting,
    ladder,
    largest_micro_batch,
    line_of,
    longest_sequence,
    nearest,
)
from orchestrator.preparation import ModelTraces, model_traces, plan_request
from orchestrator.run.prepared_run import plan_json
from orchestrator.types import bytes_text, speed_text, value_text

if TYPE_CHECKING:
    from orchestrator.run.prepared_run import PreparedRun

Predict = Callable[["PreparedRun"], dict[str, Any] | None]
"""Returns the predicted step of a plan; None without figures of its devices."""


def show_what_fits(prepared: PreparedRun, predict: Predict, as_json: bool) -> int:
    """Print the ladder of a plan, and the nearest configuration that fits."""
    models = model_traces(prepared)
    request = plan_request(prepared, models)
    with Console(stderr=True).status("planning what fits …"):
        rungs = ladder(request)
        rows = [_row(request, rung, models, predict) for rung in rungs]
    near = nearest(request, rungs)
    line = line_of(request, near) if near is not None else None
    if as_json:
        found = {"rungs": [row.to_json() for row in rows], "nearest": line}
        print_json(plan_json(prepared) | {"what_fits": found})
        return 0
    wide_console().print(_table(rows, prepared.facts.unit))
    for name in ("batch_size", "activation_checkpointing", "sharding"):
        choice = prepared.plan.choices()[name]
        print_line(f"the plan takes {name} {value_text(choice.value)}: {choice.reason}")
    print_line(_answer(request, near, line))
    return 0


def _answer(request: PlanRequest, near: Rung | None, line: str | None) -> str:
    if request.plan.memory.fits:
        return "the configuration fits"
    if near is None or line is None:
        return "nothing fits: use devices with more memory, a shorter sequence, or adapters (--lora)"
    return f"nearest configuration that fits: {line}"


@dataclass(frozen=True)
class _Row:
    """A rung with its columns."""

    rung: Rung
    flags: str
    micro_batch: int
    sequence: int | None
    speed: float | None
    """Samples, or tokens, a second."""

    def to_json(self) -> dict[str, Any]:
        plan = self.rung.plan
        return {
            "name": self.rung.name,
            "flags": self.flags,
            "note": self.rung.note,
            "only_if_asked": self.rung.only_if_asked,
            "fits": self.rung.fits,
            "memory": plan and plan.memory.to_json(),
            "largest_part": self.rung.largest_part,
            "largest_micro_batch": self.micro_batch,
            "longest_sequence": self.sequence,
            "per_second": self.speed,
        }


def _row(request: PlanRequest, rung: Rung, models: ModelTraces, predict: Predict) -> _Row:
    most = getattr(models.prepared.task, "positions", None) or MOST_TOKENS
    return _Row(
        rung,
        line_of(request, rung),
        largest_micro_batch(request, rung),
        longest_sequence(request, rung, most),
        _speed(request, rung, models, predict),
    )


def _speed(request: PlanRequest, rung: Rung, models: ModelTraces, predict: Predict) -> float | None:
    """Return the predicted samples or tokens a second, with the largest micro-batches that fit.

    The cost model knows the given kind of devices, and nothing of offload."""
    fits = fitting(request, rung) if rung.site is None and "cpu_offload" not in rung.changes else None
    if fits is None or fits.plan is None:
        return None
    config = request.config.but(**fits.changes)
    if config.parallel.cpu_offload:
        return None
    prepared = models.prepared
    resolved = replace(prepared.resolved, config=config)
    task, facts = models.trace(config)
    changed = replace(prepared, resolved=resolved, plan=fits.plan, task=task, facts=facts)
    predicted = predict(changed)
    return predicted["samples_per_second"] * prepared.facts.units_per_sample if predicted else None


def _table(rows: Sequence[_Row], unit: str) -> Table:
    columns = ["configuration", "peak", "largest part", "fits", "micro-batch up to"]
    with_length = any(row.sequence is not None for row in rows)
    with_speed = any(row.speed is not None for row in rows)
    columns += ["sequence up to"] * with_length + [f"{unit}/s"] * with_speed + ["flags, notes"]
    table = make_table(*columns, title="what fits: the peak of the device with the most, by the estimate")
    for row in rows:
        plan = row.rung.plan
        cells = ["–"] * 4
        if plan is not None:
            cells = [bytes_text(plan.memory.total), row.rung.largest_part, "yes" if row.rung.fits else "no"]
            cells.append(f"{row.micro_batch:,}")
        cells += [f"{row.sequence:,}" if row.sequence is not None else "–"] * with_length
        cells += [speed_text(row.speed)] * with_speed
        table.add_row(row.rung.name, *cells, _remark(row.rung), style="" if row.rung.fits else "dim")
    return table


def _remark(rung: Rung) -> str:
    """Return the flags that a rung adds to those before it, and its note."""
    return ": ".join(filter(None, (rung.own_flags, rung.note)))
