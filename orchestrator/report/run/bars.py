"""Bars of parts as HTML."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.report.draw.markup import esc
from orchestrator.report.run.figures.stats import shares

OTHER_COLOR = 5
# Waiting and work other than training get colours that stand out; parts without an entry are grey.
PART_COLORS = {
    "data": 1,
    "forward": 0,
    "backward": 2,
    "communication": 4,
    "optimizer": 3,
    "graph": 0,
    "training": 0,
    "evaluation": 1,
    "checkpoints": 3,
    "recovery": 4,
}


def stacked_bar(parts: Mapping[str, float], text: Mapping[str, str]) -> str:
    """Return a bar divided into its parts, with a legend below it."""
    cells = []
    keys = []
    names = []
    for name, share in shares(dict(parts)).items():
        color = PART_COLORS.get(name, OTHER_COLOR)
        cells.append(f'<i style="--c:var(--c{color});flex:{share:.5f}" title="{esc(name)}"></i>')
        label = f"{esc(name)} <b>{esc(text[name])}</b> {_percent(share)}"
        keys.append(f'<span class="key" style="--c:var(--c{color})">{label}</span>')
        names.append(f"{name} {text[name]}")
    bar = f'<div class="stack" role="img" aria-label="{esc(", ".join(names))}">{"".join(cells)}</div>'
    return f'{bar}<div class="parts">{"".join(keys)}</div>'


def labelled_bar(label: str, part: str, size: float, color: int, total: float, text: str) -> str:
    """Return a labelled bar on a common scale."""
    bar = f'<i style="--c:var(--c{color});width:{100 * size / total:.2f}%" title="{esc(part)}"></i>'
    stack = f'<div class="stack" role="img" aria-label="{esc(f"{part}: {text}")}">{bar}</div>'
    return f'<div class="bar"><span>{esc(label)}</span>{stack}<span>{esc(text)}</span></div>'


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"
