"""What tests of pictures share."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg

from orchestrator.report.draw.image import figure_of
from orchestrator.report.draw.marks import Picture


def check_labels(picture: Picture | None) -> None:
    """Check that no label of a picture overlaps another or leaves the picture."""
    assert picture is not None
    figure = figure_of(picture)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in figure.axes[0].texts
        if text.get_text()
    ]
    touching = [(a, b) for (a, box_a), (b, box_b) in combinations(boxes, 2) if box_a.overlaps(box_b)]
    assert not touching
    assert not [text for text, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1]
