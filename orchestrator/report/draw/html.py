"""Parts of all pages as HTML: escaped text, headings, tiles, tables, bars, and the page itself.

A page is a single file that needs no network and can be mailed. Its security policy allows only its own
style and its own script (by hash). Markup that a run name or a warning smuggled past the escaping would
still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files

CSS = files("orchestrator.report.draw").joinpath("page.css").read_text(encoding="utf-8")
JS = files("orchestrator.report.draw").joinpath("page.js").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6});", CSS.partition("@media")[0]))
"""The colours of the light page by name."""

# Control characters, and invisible ones that change the direction or the look of what follows.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_FLAG = r"(?<![\w-])(--[a-z][a-z0-9-]*(?: (?:on|auto|bf16|reduce-overhead|[0-9][0-9.e-]*))?)"

Tile = tuple[str, str, str]
"""Label, figure as HTML, and a line below it."""

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
_OTHER_COLOR = 5


def esc(text: object) -> str:
    """Return any text as HTML: neither markup, nor control characters, nor changes of direction."""
    return html.escape(_UNSAFE.sub("\ufffd", str(text)), quote=True)


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page from parts that are HTML already, with our style and script."""
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    content = "\n".join(part for part in body if part)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head>"
        f"<body><main>\n{content}\n</main><script>{JS}</script></body></html>\n"
    )


def page_head(title: str, facts: Mapping[str, object]) -> str:
    """Return the top of a page from a title that is HTML already; facts without a value are left out."""
    shown = "".join(
        f"<div><span>{name}</span>{esc(value)}</div>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f'<header><div class="head">{title}</div><div class="facts">{shown}</div></header>'


def heading(title: str, subtitle: str = "") -> str:
    small = f"<small>{esc(subtitle)}</small>" if subtitle else ""
    return f"<h2>{esc(title)}{small}</h2>"


def badge(tone: str, text: str) -> str:
    return f'<span class="badge t-{tone}">{esc(text)}</span>'


def note(tone: str, text: str) -> str:
    return f'<div class="card note t-{tone}">{with_code(text)}</div>'


def tile_row(shown: Iterable[Tile]) -> str:
    cells = [
        f'<div class="card tile"><div class="label">{esc(label)}</div><b>{figure}</b>'
        f'<div class="label">{esc(below)}</div></div>'
        for label, figure, below in shown
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def with_unit(text: str) -> str:
    """Return '31.2 GiB' with a smaller unit; durations of several parts stay as they are."""
    number, _, unit = text.partition(" ")
    return f"{esc(number)}<i> {esc(unit)}</i>" if unit.isalpha() or unit == "µs" else esc(text)


def with_code(text: str) -> str:
    """Return text with flags of ours set as code."""
    return re.sub(_FLAG, r'<code class="flag">\1</code>', esc(text))


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{with_code(line)}</li>' for line in lines)}</ul>"


def footer(facts: Iterable[object]) -> str:
    return f"<footer>{esc(' · '.join(map(str, facts)))}</footer>"


def table(name: str, head: str, rows: str, classes: str = "") -> str:
    """Return a table from header cells and rows that are HTML already.

    ``name`` is what a screen reader says of it. The frame can be focused: the arrow keys scroll it.
    """
    attribute = f' class="{classes}"' if classes else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(name)}"><table{attribute}>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def header_cells(*names: str) -> str:
    return "".join(header_cell(name) for name in names)


def header_cell(name: str, is_figure: bool = False) -> str:
    """Return the header of a column; figures stand to the right."""
    attribute = ' class="figure"' if is_figure else ""
    return f'<th scope="col"{attribute}>{esc(name)}</th>'


def folded(title: str, remark: str, content: str, is_open: bool = False) -> str:
    """Return a card that unfolds, with a remark beside its title."""
    state = " open" if is_open else ""
    summary = f"<summary>{esc(title)} <small>{esc(remark)}</small></summary>"
    return f'<details class="card"{state}>{summary}{content}</details>'


def search_box(text: str, label: str) -> str:
    """Return a field whose words filter the rows of the table after it."""
    return f'<input class="filter" type="search" placeholder="{esc(text)}" aria-label="{esc(label)}">'


def part_color(name: str) -> str:
    """Return the colour of a part of a step or a run as a style."""
    return f"--c:var(--c{PART_COLORS.get(name, _OTHER_COLOR)})"


def stacked_bar(parts: Mapping[str, float], text: Mapping[str, str]) -> str:
    """Return a bar divided into its parts, with a legend below it."""
    total = sum(parts.values())
    cells = []
    keys = []
    for name, part in parts.items():
        share = part / total
        percent = "under 1%" if 0 < share < 0.005 else f"{share:.0%}"
        color = part_color(name)
        cells.append(f'<i style="{color};flex:{share:.5f}" title="{esc(name)}"></i>')
        label = f"{esc(name)} <b>{esc(text[name])}</b> {percent}"
        keys.append(f'<span class="key" style="{color}">{label}</span>')
    names = ", ".join(f"{name} {text[name]}" for name in parts)
    bar = f'<div class="stack" role="img" aria-label="{esc(names)}">{"".join(cells)}</div>'
    return f'{bar}<div class="parts">{"".join(keys)}</div>'


def labelled_bar(label: str, part: str, size: float, color: int, total: float, text: str) -> str:
    """Return a labelled bar on a common scale."""
    bar = f'<i style="--c:var(--c{color});width:{100 * size / total:.2f}%" title="{esc(part)}"></i>'
    stack = f'<div class="stack" role="img" aria-label="{esc(f"{part}: {text}")}">{bar}</div>'
    return f'<div class="bar"><span>{esc(label)}</span>{stack}<span>{esc(text)}</span></div>'
