"""The page of a sweep, and all that is drawn of one: tables, pictures, ``report.html``."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.record.ledger import SweepRecord, read_sweep_record
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run.page import PAGE, document
from orchestrator.report.run.read import finite
from orchestrator.report.run.sections import heading, tile_row, with_unit
from orchestrator.report.run.stats import plural
from orchestrator.report.run.svg import esc
from orchestrator.report.sweep.cards import pictures, scaling_charts
from orchestrator.report.sweep.csv_files import best_group, scaling_csv, sweep_csv
from orchestrator.report.sweep.facts import (
    counts,
    counts_text,
    hardware_text,
    hours_text,
    in_python,
    objective_name,
    one_line,
    sentence,
    setting_text,
    space_text,
    speed_text,
    spent,
    swept,
    title,
    train_command,
    trials_text,
    tuned_command,
)
from orchestrator.report.sweep.markdown import efficiency_text, scaling_md
from orchestrator.report.sweep.plots import draw_pictures
from orchestrator.report.sweep.scaling import devices_of, interval_of, predicted_hours, ranked, speed_of
from orchestrator.report.sweep.tables import scaling_tables, trials_table
from orchestrator.types import seconds_text

SWEEP_CSV, SCALING_CSV, SCALING_MD = "sweep.csv", "scaling.csv", "scaling.md"
Tile = tuple[str, str, str]


def draw_sweep(folder: Path) -> list[Path]:
    """Draws everything anew from the ledger of a sweep: tables, pictures and page. Returns what was written."""
    record = read_sweep_record(folder)
    texts = {SWEEP_CSV: sweep_csv(record), SCALING_CSV: scaling_csv(record), SCALING_MD: scaling_md(record)}
    tables = [write_whole(folder / name, text) for name, text in texts.items()]
    return [*tables, *draw_pictures(record, folder), write_whole(folder / PAGE, sweep_page(record))]


def sweep_page(record: SweepRecord) -> str:
    """The page as text."""
    charts, tables = scaling_charts(record), scaling_tables(record)
    body = [
        _header(record),
        _notes(record),
        tile_row(_tiles(record)),
        _commands(record),
        heading("Scaling") + charts + tables if charts or tables else "",
        pictures(record),
        heading("All trials") + trials_table(record) if record.rows else "",
        _footer(record),
    ]
    return document(f"{title(record)} · sweep of {one_line(str(record.header.get('task')), 40)}", body)


def _header(record: SweepRecord) -> str:
    facts = {
        "task": record.header.get("task"),
        "device": hardware_text(record),
        "search": record.header.get("search"),
        "objective": objective_name(record),
        "trials": f"{trials_text(record)}: {counts_text(record.rows)}",
        "space": space_text(record),
    }
    shown = "".join(
        f"<div><span>{name}</span>{esc(one_line(str(value), 400))}</div>"
        for name, value in facts.items()
        if value
    )
    tone, status = ("warn", "under way or broken off") if _is_short(record) else ("good", "completed")
    badge = f'<span class="badge t-{tone}">{status}</span>'
    return f'<header><div class="head"><h1>{esc(title(record))}</h1>{badge}</div><div class="facts">{shown}</div></header>'


def _is_short(record: SweepRecord) -> bool:
    planned = record.header.get("trials")
    return isinstance(planned, int) and planned > len(record.rows)


def _notes(record: SweepRecord) -> str:
    """What nobody should overlook: that nothing was measured."""
    if ranked(record) or not record.rows:
        return ""
    told = f"No trial was completed with a result ({counts_text(record.rows)}); the reasons are in the table of trials."
    return f'<div class="card note t-bad">{esc(told)}</div>'


def _tiles(record: SweepRecord) -> list[Tile]:
    return [*_best_tiles(record), *_scaling_tile(record), *_cost_tiles(record)]


def _best_tiles(record: SweepRecord) -> list[Tile]:
    best = next(iter(ranked(record)), None)
    if best is None:
        return []
    interval, loss = interval_of(best), finite(best.validation_loss)
    spread = f"± {100 * interval:.1f}%" if interval is not None else "measured too briefly for an interval"
    rate = [
        (
            "best samples / s" if record.objective == "throughput" else "samples / s of the best",
            speed_text(speed_of(best)),
            spread,
        )
    ]
    found = (
        [("best validation loss", f"{loss:.4g}", "")]
        if record.objective == "validation_loss" and loss is not None
        else []
    )
    settings = setting_text(best, swept(record)) or f"on {plural(devices_of(best) or 1, 'device', 'devices')}"
    found += [
        *(rate if speed_of(best) is not None else []),
        ("best setting", f"<i>trial</i> {best.trial}", settings),
    ]
    if (hours := predicted_hours(record, best)) is not None:
        found.append(("whole run with it", with_unit(hours_text(hours)), "samples × epochs at this speed"))
    return found


def _scaling_tile(record: SweepRecord) -> list[Tile]:
    points = best_group(record).points
    if len(points) < 2 or record.objective != "throughput":
        return []
    last, base = points[-1], points[0].devices
    against = "one" if base == 1 else str(base)
    return [
        (
            "speed-up",
            f"{last.speedup:.2f}×",
            f"{last.devices} devices against {against}, efficiency {efficiency_text(last)}",
        )
    ]


def _cost_tiles(record: SweepRecord) -> list[Tile]:
    done = counts(record.rows).get("completed", 0)
    tiles = [("trials", str(len(record.rows)), f"{done} completed")] if record.rows else []
    return (
        [*tiles, ("time", with_unit(seconds_text(spent(record))), "of all trials together")]
        if spent(record)
        else tiles
    )


def _commands(record: SweepRecord) -> str:
    best = next(iter(ranked(record)), None)
    if best is None:
        return ""
    shown = [("Train with the best setting", train_command(record, best))]
    if not in_python(record):
        shown.append(("or with the best that fits the devices at hand", tuned_command(record)))
    return (
        '<div class="card note t-info">'
        + "".join(
            f'<div class="label">{esc(told)}</div><code class="command">{_unbroken(command)}</code>'
            for told, command in shown
        )
        + "</div>"
    )


def _unbroken(command: str) -> str:
    """A command whose flags are not broken at their hyphens."""
    return re.sub(
        r"(?<![\w-])(--[a-z][a-z0-9-]*)", r'<span class="unbroken">\1</span>', esc(one_line(command, 4000))
    )


def _footer(record: SweepRecord) -> str:
    """How it was measured, with what and when."""
    facts = [sentence(record).rpartition(". ")[2]]
    if version := record.header.get("version"):
        facts.append(f"expert-orchestrator {one_line(str(version), 20)}")
    begun = finite(record.header.get("time"))
    if begun is not None and 0 <= begun < 4e9:
        facts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
    return f"<footer>{esc(' · '.join([*facts, str(record.folder)]))}</footer>"
