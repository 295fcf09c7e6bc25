"""The files of a report: pictures, text, and ``report.html``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.record.events.decoding import finite
from orchestrator.report.draw.html import document, footer, heading
from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Picture
from orchestrator.report.run import sections
from orchestrator.report.run.evolution_section import evolution_section
from orchestrator.report.run.figures.expert_load import layer_loads
from orchestrator.report.run.figures.graph_files import write_graph_files
from orchestrator.report.run.figures.panels import training_panels
from orchestrator.report.run.figures.read import RunRecord, read_run_record, section
from orchestrator.report.run.figures.timeline import timeline_list
from orchestrator.report.run.hosts_plot import hosts_picture
from orchestrator.report.run.hosts_section import hosts_section
from orchestrator.report.run.load_plot import load_plot, ratio_key
from orchestrator.report.run.panel_plot import panel_plot
from orchestrator.report.run.plan_section import choices_table, settings_table
from orchestrator.report.run.text import performance_summary, verdict_lines
from orchestrator.storage.local_files import write_whole
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
        sections.generations_section(record),
        evolution_section(record),
        sections.experts_section(record),
        hosts_section(record),
        sections.time_section(record),
        sections.memory_section(record),
        sections.device_section(record),
        heading("What happened") + timeline if timeline else "",
        heading("Plan and settings") + plan if plan else "",
        _footer(record),
    ]
    return document(f"{record.name} · {record.status}", body)


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
    return footer([*facts, record.folder])


def draw_all(record: RunRecord, folder: Path) -> list[Path]:
    """Write every picture that the record has data for."""
    pictures = {
        "training_metrics.png": training_picture(record),
        "expert_activations.png": experts_picture(record),
        "expert_device_distribution.png": hosts_picture(record),
    }
    return [
        write_whole(folder / name, png(picture)) for name, picture in pictures.items() if picture is not None
    ]


def training_picture(record: RunRecord) -> Picture | None:
    panels = training_panels(record)
    if not panels:
        return None
    return Picture(f"Training of {record.name}", list(map(panel_plot, panels)), min(2, len(panels)))


def experts_picture(record: RunRecord) -> Picture | None:
    layers = layer_loads(record)
    if not layers:
        return None
    counts = {layer.num_experts for layer in layers}
    has_changed = any(layer.has_changed for layer in layers)
    even = f" ({1 / counts.pop():.1%})" if len(counts) == 1 and not has_changed else ""
    return Picture(
        f"Use of the experts of {record.name}",
        list(map(load_plot, layers)),
        min(len(layers), 2 if len(layers) <= 4 else 3),
        color_key=ratio_key(f"share of a layer's tokens, against an even share{even}"),
    )
