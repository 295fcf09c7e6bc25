"""Tests of the image files of a run."""

import subprocess
import sys

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record, write_run
from orchestrator.report.draw.marks import Hatch
from orchestrator.report.run.page import draw_all, experts_picture, training_picture
from tests.report.run.helpers import check_labels

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


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", RUNS)
def test_no_label_overlaps_another(tmp_path, name):
    record = record_of(tmp_path, name)
    for picture in (training_picture(record), experts_picture(record)):
        if picture is not None:
            check_labels(picture)


def test_pictures_with_data_are_drawn(tmp_path):
    assert [path.name for path in draw_all(record_of(tmp_path / "a", "late"), tmp_path / "a")] == [
        "training_metrics.png",
        "expert_activations.png",
    ]
    assert [path.name for path in draw_all(record_of(tmp_path / "b", "dense"), tmp_path / "b")] == [
        "training_metrics.png"
    ]
    assert (tmp_path / "b" / "training_metrics.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_even_share_is_in_the_colour_key(tmp_path):
    picture = experts_picture(record_of(tmp_path, "late"))
    assert picture is not None
    assert picture.color_key is not None
    assert "even share (25.0%)" in picture.color_key.title
    assert "even" in [text for _, text in picture.color_key.x_ticks]


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


def test_experts_that_did_not_exist_are_hatched(tmp_path):
    picture = experts_picture(evolving_record(tmp_path))
    assert picture is not None
    plot = picture.plots[0]
    assert plot is not None
    gaps = [mark.box for mark in plot.marks if isinstance(mark, Hatch)]
    left, lower, right, upper = gaps[0]
    assert (left, right) == (0.0, pytest.approx(5 / 12)) or (left, right) == (pytest.approx(5 / 12), 1.0)
    assert upper - lower == pytest.approx(1 / 6)
    assert picture.color_key is not None
    assert "%" not in picture.color_key.title, "the even share changed with the number of experts"
