"""What the plan chose and what was asked for, each with where it comes from, as tables of the page."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.report.run.read import RunRecord, entries, section
from orchestrator.report.run.svg import esc


def choices(record: RunRecord) -> str:
    """What the plan chose, why, and what it weighed."""
    made = [
        (name, section(section(record.plan, "choices"), name)) for name in section(record.plan, "choices")
    ]
    rows = "".join(
        f'<tr><td class="mono">{esc(name)}</td><td class="mono">{_value(choice.get("value"))}</td>'
        f"<td>{esc(choice.get('reason') or '')}{_rejected(choice)}</td></tr>"
        for name, choice in made
        if choice
    )
    shown = table(("setting", "chosen", "reason"), rows)
    return (
        f'<details class="card" open><summary>What the plan chose</summary>{shown}</details>' if rows else ""
    )


def _rejected(choice: dict[str, Any]) -> str:
    """Options that were weighed and not taken."""
    weighed = entries(choice, "rejected")
    return "".join(
        f'<div class="not">not <code>{esc(item.get("option"))}</code>: {esc(item.get("why"))}</div>'
        for item in weighed
    )


def settings(record: RunRecord) -> str:
    """Every setting with where it came from; those somebody set first."""
    found = sorted(entries(record.plan, "settings"), key=lambda item: item.get("origin") == "default")
    if not found:
        return ""
    rows = "".join(
        f'<tr class="{"plain" if item.get("origin") == "default" else "changed"}"><td class="mono">{esc(item.get("name"))}</td>'
        f'<td class="mono">{_value(item.get("value"))}</td><td>{esc(item.get("origin") or "")}</td></tr>'
        for item in found
    )
    count = sum(item.get("origin") != "default" for item in found)
    shown = table(("setting", "value", "from"), rows)
    filter_box = (
        '<input class="filter" type="search" placeholder="Filter settings" aria-label="Filter settings">'
    )
    return f'<details class="card"><summary>Settings <small>{len(found)}, {count} of them set</small></summary>{filter_box}{shown}</details>'


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return esc(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def table(names: tuple[str, ...], rows: str) -> str:
    """Rows that are HTML already, under their names."""
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
