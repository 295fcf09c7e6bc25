"""Tests of the image files of a run."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record, write_run
from orchestrator.report.run.plots import draw_all, experts_figure, training_figure

RUNS = {
    "dense": FakeRun(),
    "one": FakeRun(steps=1, epochs=1, experts=4, layers=1),
    "long": FakeRun(steps=20_000, epochs=200),
    "late": FakeRun(steps=60, epochs=2, experts=4),
    "broken": FakeRun(steps=60, broken={5: "inf", 20: "nan", 21: "nan"}, experts=2),
    "wide": FakeRun(steps=300, epochs=2, experts=64, layers=12),
    "hostile": FakeRun(steps=12, name=r"$\frac{ <b>&" + "n" * 200, experts=2),
}


def record_of(tmp_path, name):
    return run_record(tmp_path, RUNS[name])


def overlaps(boxes):
    """Return the neighbouring labels that overlap."""
    return [(a, b) for a, b in pairwise(boxes) if a.overlaps(b)]


@pytest.mark.parametrize("name", RUNS)
def test_no_label_overlaps_another(tmp_path, name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    record = record_of(tmp_path, name)
    for figure in (training_figure(record), experts_figure(record)):
        if figure is None:
            continue
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                texts = [text for text in axis.get_ticklabels() if text.get_text() and axes.get_visible()]
                assert not overlaps([text.get_window_extent(canvas.get_renderer()) for text in texts]), (
                    axes.get_title(loc="left"),
                    texts,
                )


def test_pictures_with_data_are_drawn(tmp_path):
    assert [path.name for path in draw_all(record_of(tmp_path / "a", "late"), tmp_path / "a")] == [
        "training_metrics.png",
        "expert_activations.png",
    ]
    assert [path.name for path in draw_all(record_of(tmp_path / "b", "dense"), tmp_path / "b")] == [
        "training_metrics.png"
    ]
    assert (tmp_path / "b" / "training_metrics.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_fills_a_page_of_a_thousand_pixels(tmp_path):
    figure = training_figure(record_of(tmp_path, "dense"))
    assert figure is not None
    assert figure.get_size_inches()[0] * 100 == 1000
    assert figure.get_dpi() >= 150


def test_without_data_no_picture_is_drawn(tmp_path):
    record = run_record(tmp_path, FakeRun(steps=0, ends="failed"))
    assert draw_all(record, tmp_path) == []
    assert not list(tmp_path.glob("*.png"))


def test_metric_names_are_not_parsed_as_formulas(tmp_path):
    events = [
        event | {"metrics": {"$\\sum_": 0.5}} if event["event"] == "step" else event
        for event in run_events(FakeRun(steps=5))
    ]
    assert draw_all(events_record(tmp_path, events), tmp_path)


def test_the_even_share_is_on_the_colour_bar(tmp_path):
    figure = experts_figure(record_of(tmp_path, "late"))
    assert figure is not None
    bar = figure.axes[-1]
    assert "even share (25.0%)" in bar.get_xlabel()
    assert "even" in [text.get_text() for text in bar.get_xticklabels()]


def test_heavy_packages_are_imported_late(tmp_path):
    write_run(tmp_path, FakeRun(steps=5, epochs=1))
    code = (
        "import sys, pathlib; from orchestrator.report.run.page import draw_report\n"
        "heavy = {'matplotlib', 'numpy', 'torch', 'ray', 'pandas'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        f"draw_report(pathlib.Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'ray', 'matplotlib.pyplot'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_experts_that_did_not_exist_are_blank(tmp_path):
    figure = experts_figure(evolving_record(tmp_path))
    assert figure is not None
    axes = figure.axes[0]
    cells: Any = axes.collections[0].get_array()
    is_blank = cells.mask.reshape(6, 12).tolist()
    assert is_blank[5] == [True] * 5 + [False] * 7
    assert is_blank[0] == [False] * 5 + [True] * 7
    assert axes.patch.get_hatch()
    assert "%" not in figure.axes[-1].get_xlabel(), "the even share changed with the number of experts"
