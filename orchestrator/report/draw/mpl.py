"""Common look of the image files. matplotlib's object API only: no window, no global figure, safe
in any thread."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ten inches at 100 dpi fill a page of 1000 pixels; the file has more dots, for finer screens.
WIDTH_IN = 10.0
DPI = 160
COLORS = ("#3b5bdb", "#e8590c", "#0c8599", "#9c36b5", "#2f9e44", "#5c6f82")
INK = "#1d2327"
MUTED = "#667080"
LINE = "#e4e7eb"
BAD = "#c92a2a"
FAINT = "#f6f7f8"
COLD = "#2b6cb0"
WARM = "#d9480f"
USE_MARKS = {-2.0: "¼× or less", -1.0: "½×", 0.0: "even", 1.0: "2×", 2.0: "4× or more"}
"""Meaning of the colours of expert use, by log2 of the ratio to the even share."""
MAX_TEXT_CHARS = 70


def new_figure(height_in: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained", facecolor="white")
    # pyrefly: ignore[missing-attribute]
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.03, hspace=0.04)
    figure.suptitle(plain_text(title), fontsize=12, fontweight="bold", color=INK, x=0.012, ha="left")
    return figure


def style_axes(axes: Axes, title: str, unit: str) -> None:
    text = plain_text(title) + (f"  ({unit})" if unit else "")
    axes.set_title(text, fontsize=9.5, color=INK, loc="left", pad=6)
    axes.tick_params(labelsize=8, colors=MUTED, length=0, pad=4)
    axes.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)


def use_colors() -> Any:
    """Return the colour map of use: cold below the even share, faint at it, warm above."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("use", [COLD, FAINT, WARM])


def color_key(figure: Figure, image: Any, grid: Any, marks: dict[float, str], label: str) -> None:
    """Draw the meaning of the colours below the plots."""
    bar = figure.colorbar(image, ax=grid, location="bottom", fraction=0.05, shrink=0.6, aspect=50, pad=0.04)
    bar.set_ticks(list(marks), labels=list(marks.values()))
    bar.set_label(label, fontsize=8, color=MUTED)
    bar.ax.tick_params(labelsize=8, colors=MUTED, length=3)
    bar.outline.set_visible(False)


def plain_text(text: str) -> str:
    """Return text that matplotlib shows as it is: it parses what lies between dollar signs as a formula."""
    short = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
    return short.replace("\\", "/").replace("$", r"\$")


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    FigureCanvasAgg(figure).print_png(target)
    return target.getvalue()
