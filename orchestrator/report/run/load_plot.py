"""Drawings of the use of the experts, for the page and the image files."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby

from orchestrator.report.draw.axes import step_axis, ticks
from orchestrator.report.draw.marks import Cells, Color, Hatch, Mark, Plot, color_key
from orchestrator.report.run.figures.expert_load import MAX_LOG2, LayerLoad, clipped_log2

EXPERT_PX = 14
MIN_HEIGHT_PX = 96
MAX_HEIGHT_PX = 224
USE_TICKS = ((0.0, "¼× or less"), (0.25, "½×"), (0.5, "even"), (0.75, "2×"), (1.0, "4× or more"))


def ratio_color(ratio: float, limit: float = MAX_LOG2, most: float = 1.0) -> Color:
    """Return the colour of a ratio: cold below 1, warm above, faint at 1. ``most`` is that of the limit."""
    strength = clipped_log2(ratio, limit) / limit
    return Color("warm" if strength > 0 else "cold", most * abs(strength))


def ratio_key(title: str, ticks_: tuple[tuple[float, str], ...] = USE_TICKS, most: float = 1.0) -> Plot:
    return color_key(title, Color("cold", most), Color("fill"), Color("warm", most), ticks_)


def load_plot(layer: LayerLoad) -> Plot:
    """Return a layer: rows are experts, columns time; hatched where an expert did not exist."""
    recent = layer.recent()
    spread = f"{min(recent):.2f}× to {max(recent):.2f}× the even share" if recent else ""
    num_rows = len(layer.ids)
    colors = tuple(
        tuple(Color("fill") if ratio is None else ratio_color(ratio) for ratio in row) for row in layer.ratios
    )
    rows = sorted({int(mark) for mark in ticks(0, num_rows - 1, 9) if mark == int(mark)})
    marks = step_axis(layer.steps, max_labels=4)
    return Plot(
        f"Layer {layer.layer}",
        (Cells((0, 0, 1, 1), colors), *_gaps(layer)),
        f"Layer {layer.layer}: rows are experts, columns time, colour is share of tokens. {spread}",
        remark=spread,
        x_label="step",
        y_label="expert",
        x_ticks=tuple(
            (_place(layer.steps, mark), text) for mark, text in zip(marks.ticks, marks.labels, strict=True)
        ),
        y_ticks=tuple((1 - (row + 0.5) / num_rows, str(layer.ids[row])) for row in rows),
        height=max(MIN_HEIGHT_PX, min(MAX_HEIGHT_PX, EXPERT_PX * num_rows)),
    )


def _gaps(layer: LayerLoad) -> list[Mark]:
    """Return the times without a ratio of each expert."""
    gaps: list[Mark] = []
    height = 1 / len(layer.ratios)
    for row, ratios in enumerate(layer.ratios):
        upper = 1 - row * height
        for is_gap, columns in groupby(range(len(ratios)), key=lambda column: ratios[column] is None):
            places = [column / len(ratios) for column in columns]
            if is_gap:
                gaps.append(Hatch((places[0], upper - height, places[-1] + 1 / len(ratios), upper)))
    return gaps


def _place(steps: list[int], step: float) -> float:
    """Return the place of a step among columns of one width, each named by its last step."""
    if len(steps) == 1:
        return 0.5
    edges = [2 * steps[0] - steps[1], *steps]
    column = max(1, bisect_left(edges, step))
    return (column - 1 + (step - edges[column - 1]) / (edges[column] - edges[column - 1])) / len(steps)
