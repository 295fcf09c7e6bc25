"""report.html: one file that holds everything, asks the network for nothing, and can be mailed.

The page forbids itself everything but its own style and its own script (by hash), so that a run name or a warning that
smuggled markup past the escaping would still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.report.draw.theme import CSS, JS
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run import sections
from orchestrator.report.run.hosts_section import living
from orchestrator.report.run.plan_section import choices, settings
from orchestrator.report.run.plots import draw_all
from orchestrator.report.run.read import RunRecord, finite, read_run_record, section
from orchestrator.report.run.svg import esc
from orchestrator.report.run.text import performance_summary
from orchestrator.report.run.timeline import timeline_list
from orchestrator.types import bytes_text

PAGE = "report.html"
SUMMARY = "performance_summary.txt"


def draw_report(folder: Path) -> list[Path]:
    """Draws everything anew from a run folder alone: the pictures, the text and the page. Returns what was written."""
    record = read_run_record(folder)
    summary = write_whole(folder / SUMMARY, performance_summary(record))
    return [*draw_all(record, folder), summary, write_page(record, folder)]


def write_page(record: RunRecord, folder: Path) -> Path:
    return write_whole(folder / PAGE, page(record))


def page(record: RunRecord) -> str:
    """The page as text."""
    happened, plan = timeline_list(record), choices(record) + settings(record)
    body = [
        sections.header(record),
        sections.notes(record),
        sections.tiles(record),
        sections.verdict_box(record),
        sections.curves(record),
        sections.experts(record),
        living(record),
        sections.time_spent(record),
        sections.memory_bars(record),
        sections.device(record),
        sections.heading("What happened") + happened if happened else "",
        sections.heading("Plan and settings") + plan if plan else "",
        _footer(record),
    ]
    return document(f"{record.name} · {record.status}", body)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page of parts that are HTML already, with the house's style and script."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head>"
        f"<body><main>\n{chr(10).join(part for part in body if part)}\n</main><script>{JS}</script></body></html>\n"
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def _footer(record: RunRecord) -> str:
    """Machine, versions and when: what one needs to repeat a run."""
    hardware = section(record.plan, "hardware")
    versions = {"expert-orchestrator": record.start.get("version"), "torch": hardware.get("torch")} | section(
        hardware, "versions"
    )
    facts = [f"{name} {value}" for name, value in versions.items() if value]
    if (cores := hardware.get("cores")) is not None:
        facts.append(f"{cores} cores")
    if (ram := finite(hardware.get("ram", hardware.get("ram_total")))) is not None:
        facts.append(f"{bytes_text(ram)} RAM")
    begun = finite(record.start.get("time"))
    if begun is not None and 0 <= begun < 4e9:
        facts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
    return f"<footer>{esc(' · '.join([*facts, str(record.folder)]))}</footer>"
