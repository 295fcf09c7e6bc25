"""Tables of the plan's choices and of the settings, each with its reason or origin."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.report.draw.html import esc, folded, header_cells, search_box, table
from orchestrator.report.run.figures.read import RunRecord, entries, section
from orchestrator.types import is_worth_a_row


def choices_table(record: RunRecord) -> str:
    """Return the plan's choices that have an effect, their reasons, and the rejected options."""
    named = section(record.plan, "choices")
    choices = {name: choice for name in named if (choice := section(named, name))}
    used = {
        name: choice for name, choice in choices.items() if is_worth_a_row(str(choice.get("reason") or ""))
    }
    rows = "".join(_choice_row(name, choice) for name, choice in used.items())
    if not rows:
        return ""
    num_unused = len(choices) - len(used)
    unused = f", {num_unused} without effect in this run are in plan.json" if num_unused else ""
    title = "Choices of the plan"
    return folded(
        title, f"{len(used)}{unused}", table(title, header_cells("setting", "chosen", "reason"), rows)
    )


def _choice_row(name: str, choice: dict[str, Any]) -> str:
    value = f'<td class="mono">{_value(choice.get("value"))}</td>'
    reason = f"<td>{esc(choice.get('reason') or '')}{_rejected(choice)}</td>"
    return f'<tr><td class="mono">{esc(name)}</td>{value}{reason}</tr>'


def _rejected(choice: dict[str, Any]) -> str:
    return "".join(
        f'<div class="not">not <code>{esc(item.get("option"))}</code>: {esc(item.get("why"))}</div>'
        for item in entries(choice, "rejected")
    )


def settings_table(record: RunRecord) -> str:
    """Return every setting with its origin, those that differ from the default first."""
    settings = sorted(entries(record.plan, "settings"), key=lambda item: item.get("origin") == "default")
    if not settings:
        return ""
    rows = ""
    num_changed = 0
    for setting in settings:
        is_default = setting.get("origin") == "default"
        num_changed += not is_default
        cells = (
            f'<td class="mono">{esc(setting.get("name"))}</td>'
            f'<td class="mono">{_value(setting.get("value"))}</td><td>{esc(setting.get("origin") or "")}</td>'
        )
        rows += f'<tr class="{"plain" if is_default else "changed"}">{cells}</tr>'
    shown = table("Settings", header_cells("setting", "value", "from"), rows)
    search = search_box("Filter settings", "Filter settings")
    return folded("Settings", f"{len(settings)}, {num_changed} of them set", search + shown)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return esc(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
