"""The report of a sweep: tables, pictures and ``report.html``."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.config.sweep.objective import THROUGHPUT
from orchestrator.record.events.decoding import finite
from orchestrator.record.files.ledger import SweepRecord, TrialRow, read_sweep_record
from orchestrator.report.draw.html import (
    Tile,
    badge,
    document,
    esc,
    footer,
    heading,
    note,
    page_head,
    tile_row,
    with_unit,
)
from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Picture, Plot
from orchestrator.report.draw.page_plot import grid
from orchestrator.report.run.page import PAGE
from orchestrator.report.sweep.facts import (
    counts_text,
    edge_text,
    hardware_text,
    hours_text,
    is_python_task,
    measurement_text,
    num_failed,
    objective_name,
    objective_text,
    objective_value,
    one_line,
    point_text,
    space_text,
    status_counts,
    swept_settings,
    ties_text,
    title,
    total_seconds,
    train_command,
    trials_text,
    tuned_command,
)
from orchestrator.report.sweep.frames import scaling_csv, sweep_csv
from orchestrator.report.sweep.heatmap import heat_map
from orchestrator.report.sweep.markdown import scaling_md
from orchestrator.report.sweep.parallel_coords import parallel_plot
from orchestrator.report.sweep.scaling import best_series
from orchestrator.report.sweep.scaling_plots import scaling_plots
from orchestrator.report.sweep.scaling_text import efficiency_text
from orchestrator.report.sweep.tables import scaling_tables, trials_table
from orchestrator.report.sweep.trials import num_devices, predicted_hours, throughput
from orchestrator.storage.local_files import write_whole
from orchestrator.types import counted, seconds_text, speed_text

SWEEP_CSV = "sweep.csv"
SCALING_CSV = "scaling.csv"
SCALING_MD = "scaling.md"


def draw_sweep(folder: Path) -> list[Path]:
    """Draw tables, pictures and page from the ledger of a sweep and return the paths of the written files."""
    record = read_sweep_record(folder)
    texts = {
        SWEEP_CSV: sweep_csv(record),
        SCALING_CSV: scaling_csv(record),
        SCALING_MD: scaling_md(record),
    }
    tables = [write_whole(folder / name, text) for name, text in texts.items()]
    pictures = draw_pictures(record, folder)
    return [*tables, *pictures, write_whole(folder / PAGE, sweep_page(record))]


def sweep_page(record: SweepRecord) -> str:
    """Return the page as text."""
    charts = grid(scaling_plots(record))
    drawings = [drawing for drawing in (heat_map(record), parallel_plot(record)) if drawing is not None]
    tables = scaling_tables(record)
    body = [
        _header(record),
        _note(record),
        tile_row([*_best_tiles(record), *_scaling_tiles(record), *_cost_tiles(record)]),
        _commands(record),
        heading("What matters") + grid(drawings, " one") if drawings else "",
        heading("Scaling") + charts + tables if charts or tables else "",
        heading("All trials") + trials_table(record) if record.rows else "",
        _footer(record),
    ]
    task = one_line(str(record.header.get("task")), 40)
    return document(f"{title(record)} · sweep of {task}", body)


def _header(record: SweepRecord) -> str:
    facts = {
        "task": record.header.get("task"),
        "device": hardware_text(record),
        "search": record.header.get("search"),
        "objective": objective_name(record),
        "trials": f"{trials_text(record)}: {counts_text(record.rows)}",
        "space": space_text(record),
    }
    known = {name: one_line(str(value), 400) for name, value in facts.items() if value}
    return page_head(f"<h1>{esc(title(record))}</h1>{badge(*_badge(record))}", known)


def _badge(record: SweepRecord) -> tuple[str, str]:
    """Return the tone and the text of the sweep's state; trials that failed are part of it."""
    if not _is_complete(record):
        return "warn", "running or interrupted"
    failed = num_failed(record)
    if not failed:
        return "good", "completed"
    return "warn" if record.best() else "bad", f"ended, {failed} of {len(record.rows)} trials failed"


def _is_complete(record: SweepRecord) -> bool:
    planned = record.header.get("trials")
    return not isinstance(planned, int) or planned <= len(record.rows)


def _note(record: SweepRecord) -> str:
    """Return a note that no trial was measured, or that the best one is tied with others or at the edge
    of the grid."""
    remarks = [text[0].upper() + text[1:] for text in (ties_text(record), edge_text(record)) if text]
    if remarks:
        return note("warn", f"{'. '.join(remarks)}.")
    if record.best() is not None or not record.rows:
        return ""
    text = (
        f"No trial completed with a result ({counts_text(record.rows)}); "
        "the reasons are in the table of trials."
    )
    return note("bad", text)


def _best_tiles(record: SweepRecord) -> list[Tile]:
    best = record.best()
    if best is None:
        return []
    tiles: list[Tile] = []
    value = objective_value(record, best)
    if record.objective != THROUGHPUT and value is not None:
        tiles.append((f"best {objective_name(record)}", objective_text(record, value), ""))
    speed = throughput(best)
    if speed is not None:
        name = "best samples / s" if record.objective == THROUGHPUT else "samples / s of the best"
        tiles.append((name, speed_text(speed), _spread_text(best)))
    devices = counted(num_devices(best) or 1, "device")
    settings = point_text(best, swept_settings(record)) or f"on {devices}"
    tiles.append(("best setting", f"<i>trial</i> {best.trial}", settings))
    hours = predicted_hours(record, best)
    if hours is not None:
        tiles.append(("whole run with it", with_unit(hours_text(hours)), "samples × epochs at this speed"))
    return tiles


def _spread_text(row: TrialRow) -> str:
    interval = row.interval
    return "measured too briefly for an interval" if interval is None else f"± {100 * interval:.1f}%"


def _scaling_tiles(record: SweepRecord) -> list[Tile]:
    best = best_series(record)
    if best is None or len(best.points) < 2 or record.objective != THROUGHPUT:
        return []
    last = best.points.iloc[-1]
    base = "one" if best.base_devices == 1 else str(best.base_devices)
    efficiency = efficiency_text(last["efficiency"], last["efficiency_interval"])
    details = f"{best.max_devices} devices against {base}, efficiency {efficiency}"
    return [("speed-up", f"{last['speedup']:.2f}×", details)]


def _cost_tiles(record: SweepRecord) -> list[Tile]:
    tiles: list[Tile] = []
    if record.rows:
        num_completed = status_counts(record.rows).get("completed", 0)
        tiles.append(("trials", str(len(record.rows)), f"{num_completed} completed"))
    seconds = total_seconds(record)
    if seconds:
        tiles.append(("time", with_unit(seconds_text(seconds)), "of all trials together"))
    return tiles


def _commands(record: SweepRecord) -> str:
    best = record.best()
    if best is None:
        return ""
    commands = {"Train with the best setting": train_command(record, best)}
    if not is_python_task(record):
        commands["or with the best setting that fits your devices"] = tuned_command(record)
    lines = [
        f'<div class="label">{esc(label)}</div><code class="command">{_command_html(command)}</code>'
        for label, command in commands.items()
    ]
    return f'<div class="card note t-info">{"".join(lines)}</div>'


def _command_html(command: str) -> str:
    """Return a command whose flags are not wrapped at their hyphens."""
    flag = r"(?<![\w-])(--[a-z][a-z0-9-]*)"
    return re.sub(flag, r'<span class="unbroken">\1</span>', esc(one_line(command, 4000)))


def _footer(record: SweepRecord) -> str:
    """Return how the throughput was measured, the version, the time and the folder."""
    facts = [measurement_text()]
    version = record.header.get("version")
    if version:
        facts.append(f"expert-orchestrator {one_line(str(version), 20)}")
    begun = finite(record.header.get("time"))
    if begun is not None and 0 <= begun < 4e9:
        facts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
    return footer([*facts, record.folder])


def draw_pictures(record: SweepRecord, folder: Path) -> list[Path]:
    """Write every picture that the sweep has data for; remove an old one that it has no data for any more."""
    name = title(record)
    pictures = {
        "scaling.png": _picture(f"Scaling of {name}", scaling_plots(record), 2),
        "heatmap.png": _picture(f"Settings of {name}", [heat_map(record)]),
        "parallel_coordinates.png": _picture(f"Trials of {name}", [parallel_plot(record)]),
    }
    written = []
    for file, picture in pictures.items():
        if picture is None:
            (folder / file).unlink(missing_ok=True)
        else:
            written.append(write_whole(folder / file, png(picture)))
    return written


def _picture(title_: str, plots: list[Plot | None] | list[Plot], num_columns: int = 1) -> Picture | None:
    return Picture(title_, plots, num_columns) if any(plots) else None
