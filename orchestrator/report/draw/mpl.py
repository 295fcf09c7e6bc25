"""The paper that the pictures are drawn on: matplotlib's object API, no window, no global figure, safe in any thread."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ten inches at 100 dots fill a page 1000 px wide; the file has more dots, for screens that have them.
WIDTH_IN, DOTS = 10.0, 160
COLORS = ("#3b5bdb", "#e8590c", "#0c8599", "#9c36b5", "#2f9e44", "#5c6f82")
INK, MUTED, LINE, BAD = "#1d2327", "#667080", "#e4e7eb", "#c92a2a"
FAINT, COLD, WARM = "#f6f7f8", "#2b6cb0", "#d9480f"
USE_MARKS = {-2.0: "¼× or less", -1.0: "½×", 0.0: "even", 1.0: "2×", 2.0: "4× or more"}
"""What the colours of expert use say, by doublings of the even share."""


def new_figure(height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height), dpi=DOTS, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.03, hspace=0.04)  # type: ignore[union-attr]
    figure.suptitle(plain(title), fontsize=12, fontweight="bold", color=INK, x=0.012, ha="left")
    return figure


def dress(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(plain(title) + (f"  ({unit})" if unit else ""), fontsize=9.5, color=INK, loc="left", pad=6)
    axes.tick_params(labelsize=8, colors=MUTED, length=0, pad=4)
    axes.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)


def warmth() -> Any:
    """From cold over faint to warm: less than even, even, more."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("use", [COLD, FAINT, WARM])


def key_bar(figure: Figure, image: Any, grid: Any, marks: dict[float, str], label: str) -> None:
    """What the colours mean, below the drawings."""
    bar = figure.colorbar(image, ax=grid, location="bottom", fraction=0.05, shrink=0.6, aspect=50, pad=0.04)
    bar.set_ticks(list(marks), labels=list(marks.values()))
    bar.set_label(label, fontsize=8, color=MUTED)
    bar.ax.tick_params(labelsize=8, colors=MUTED, length=3)
    bar.outline.set_visible(False)  # type: ignore[operator]


def plain(text: str) -> str:
    """Names are no formulas: matplotlib reads what lies between dollar signs as one."""
    short = text if len(text) <= 70 else text[:69] + "…"
    return short.replace("\\", "/").replace("$", r"\$")


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    FigureCanvasAgg(figure).print_png(target)
    return target.getvalue()
