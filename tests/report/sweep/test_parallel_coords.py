"""Tests of parallel coordinates: scales, marks, lines."""

from itertools import pairwise

import pytest

from harness.fakes.fake_sweep import MIXED, ONE, random_points, write_record
from orchestrator.report.draw.marks import Group, Path, Plot
from orchestrator.report.sweep.heatmap import BEST
from orchestrator.report.sweep.parallel_coords import MIN_DISTANCE, numeric_scale, parallel_plot, word_scale


def test_numbers_over_a_wide_range_get_a_logarithmic_scale() -> None:
    assert numeric_scale("x", [1, 2, 4, 8]).places == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert numeric_scale("x", [1, 2, 4, 7]).places == pytest.approx((0, 1 / 6, 1 / 2, 1))
    assert numeric_scale("x", [0, 1, 100]).places == pytest.approx((0, 0.01, 1)), "zero has no logarithm"
    assert numeric_scale("x", [5, 5]).marks == ((0.5, "5"),)


@pytest.mark.parametrize(
    "values",
    [
        [1, 1.01, 1.02, 5, 5.01],
        [place / 3 for place in range(500)],
        [10.0**-place for place in range(9)],
    ],
)
def test_marks_do_not_touch(values: list[float]) -> None:
    places = [place for place, _ in numeric_scale("x", values).marks]
    assert all(after - before >= MIN_DISTANCE for before, after in pairwise(places))


def test_both_ends_of_an_axis_are_marked() -> None:
    assert [text for _, text in numeric_scale("x", [1, 1.01, 1.02, 5, 5.01]).marks] == ["1", "5.01"]


def test_words_and_numbers_share_an_axis() -> None:
    scale = word_scale("batch", ["auto", 64, 16, None, True])
    assert [text for _, text in scale.marks][:2] == ["16", "64"]
    assert len(set(scale.places)) == 5


def curves(plot: Plot) -> list[Group]:
    return [mark for mark in plot.marks if isinstance(mark, Group)]


def test_lines_go_from_the_worst_to_the_best(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    plot = parallel_plot(record)
    best = record.best()
    assert plot is not None
    assert best is not None
    lines = curves(plot)
    assert lines[-1].text.startswith(f"trial {best.trial}: ")
    assert [mark.stroke for mark in lines[-1].marks if isinstance(mark, Path)] == [BEST]
    names = [text for _, text in plot.x_ticks]
    assert names == ["precision", "batch", "accumulation", "devices", "samples/s"]
    assert len(lines) == sum(row.status == "completed" for row in record.rows)
    starts = [
        line.marks[0].steps[0][1][0][1]
        for line in lines
        if "precision fp32" in line.text and isinstance(line.marks[0], Path)
    ]
    assert len(set(starts)) == len(starts), "lines through one value are next to each other"
    assert starts == sorted(starts), "the best is on top"


def test_two_hundred_trials_of_six_settings_have_seven_axes(tmp_path) -> None:
    plot = parallel_plot(write_record(tmp_path, points=random_points(200)))
    assert plot is not None
    assert len(plot.x_ticks) == 7


def test_without_swept_settings_there_is_no_plot(tmp_path) -> None:
    assert parallel_plot(write_record(tmp_path, ONE)) is None
