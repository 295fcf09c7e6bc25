"""Tests of the image files of a sweep: they can be drawn of any sweep."""

from dataclasses import replace

import pytest

from harness.fakes.fake_sweep import EXPERTS, HOSTILE, ONE, SWEEPS, write_record
from orchestrator.report.sweep.page import draw_pictures
from orchestrator.report.sweep.scaling_plots import scaling_plots

FILES = {
    "mixed": ["scaling.png", "heatmap.png", "parallel_coordinates.png"],
    "one": [],
    "single": ["heatmap.png", "parallel_coordinates.png"],
    "nothing": [],
    "hostile": ["scaling.png", "heatmap.png", "parallel_coordinates.png"],
    "empty": [],
}


@pytest.mark.parametrize("name", FILES)
def test_pictures_with_data_are_drawn(tmp_path, name) -> None:
    written = draw_pictures(write_record(tmp_path, SWEEPS[name]), tmp_path)
    assert [path.name for path in written] == FILES[name]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_an_outdated_picture_is_removed(tmp_path) -> None:
    (tmp_path / "scaling.png").write_bytes(b"old")
    draw_pictures(write_record(tmp_path, ONE), tmp_path)
    assert not (tmp_path / "scaling.png").exists()


def test_the_scaling_is_drawn_for_both_kinds(tmp_path) -> None:
    plots = scaling_plots(write_record(tmp_path, EXPERTS))
    assert [plot.title.partition(" ")[0] for plot in plots] == ["Strong", "Strong", "Weak", "Weak"]
    assert plots[0].scale is not None
    assert plots[0].scale.x_is_log
    assert plots[0].scale.y_is_log
    assert plots[1].scale is not None
    assert not plots[1].scale.y_is_log, "the efficiency"
    assert [text for _, text in plots[0].x_ticks] == ["1", "2", "4", "8"]


def test_hostile_names_are_not_parsed_as_formulas(tmp_path) -> None:
    record = write_record(tmp_path, replace(HOSTILE, failing=()))
    assert len(draw_pictures(record, tmp_path)) == 3
