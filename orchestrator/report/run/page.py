"""report.html: a single file that needs no network and can be mailed.

The page's security policy allows only its own style and its own script (by hash). Markup that a run
name or a warning smuggled past the escaping would still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.record.events.decoding import finite
from orchestrator.report.draw.markup import esc
from orchestrator.report.draw.theme import CSS, JS
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run import sections
from orchestrator.report.run.evolution_section import evolution_section
from orchestrator.report.run.figures.graph_files import write_graph_files
from orchestrator.report.run.figures.read import RunRecord, read_run_record, section
from orchestrator.report.run.figures.timeline import timeline_list
from orchestrator.report.run.generations_section import generations_section
from orchestrator.report.run.hosts_section import hosts_section
from orchestrator.report.run.plan_section import choices_table, settings_table
from orchestrator.report.run.plots import draw_all
from orchestrator.report.run.text import performance_summary, verdict_lines
from orchestrator.types import bytes_text

PAGE = "report.html"
SUMMARY = "performance_summary.txt"
MAX_TIME = 4e9
"""Unix seconds; a damaged file may hold times that no date can represent."""


def draw_report(folder: Path, note: Callable[[str], None] | None = None, at_end: bool = False) -> list[Path]:
    """Draw pictures, text and page from a run folder alone and return the paths of the written files.

    ``note`` receives the verdicts of the page, a line each. ``at_end`` of a run, its setting ``plots``
    decides whether pictures are drawn."""
    record = read_run_record(folder)
    if note is not None:
        for line in verdict_lines(record):
            note(line)
    # The page comes last: a reader of it finds the other files complete.
    summary = write_whole(folder / SUMMARY, performance_summary(record))
    with_pictures = not at_end or draws_at_end(record)
    pictures = draw_all(record, folder) if with_pictures else []
    graphs = write_graph_files(record, folder, with_pictures)
    return [*pictures, *graphs, summary, write_whole(folder / PAGE, page(record))]


def draws_at_end(record: RunRecord) -> bool:
    """Return whether the settings of a run ask for pictures at its end."""
    return section(record.config, "watch").get("plots") != "off"


def page(record: RunRecord) -> str:
    """Return the page as text."""
    timeline = timeline_list(record)
    plan = choices_table(record) + settings_table(record)
    body = [
        sections.header(record),
        sections.notes(record),
        sections.tiles(record),
        sections.verdict_cards(record),
        sections.training_section(record),
        generations_section(record),
        evolution_section(record),
        sections.experts_section(record),
        hosts_section(record),
        sections.time_section(record),
        sections.memory_section(record),
        sections.device_section(record),
        sections.heading("What happened") + timeline if timeline else "",
        sections.heading("Plan and settings") + plan if plan else "",
        _footer(record),
    ]
    return document(f"{record.name} · {record.status}", body)


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page from parts that are HTML already, with our style and script."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_security_policy()}">'
    content = "\n".join(part for part in body if part)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head>"
        f"<body><main>\n{content}\n</main><script>{JS}</script></body></html>\n"
    )


def _security_policy() -> str:
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def _footer(record: RunRecord) -> str:
    """Return versions, machine and time: the facts needed to repeat a run."""
    hardware = section(record.plan, "hardware")
    versions = {"expert-orchestrator": record.start.version, "torch": hardware.get("torch")}
    versions |= section(hardware, "versions")
    facts = [f"{name} {value}" for name, value in versions.items() if value]
    if hardware.get("commit"):
        facts.append(f"commit {hardware['commit']} of the folder it was started in")
    cores = hardware.get("cores")
    if cores is not None:
        facts.append(f"{cores} cores")
    ram = finite(hardware.get("ram", hardware.get("ram_total")))
    if ram is not None:
        facts.append(f"{bytes_text(ram)} RAM")
    begun = record.start.time
    if begun is not None and begun < MAX_TIME:
        facts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
    return f"<footer>{esc(' · '.join([*facts, str(record.folder)]))}</footer>"
