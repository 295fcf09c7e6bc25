"""Tests of the heat map: its settings, its cells, its bins."""

import pytest

from harness.fakes.fake_sweep import MIXED, NOTHING, ONE, SINGLE, FakeSweep, random_points, write_record
from orchestrator.report.draw.marks import Color, Group, Path, Plot, Text, flat
from orchestrator.report.sweep.heatmap import (
    BEST,
    BEST_SHARE,
    explained_variance,
    heat_map,
    setting_effect,
    setting_levels,
)
from orchestrator.types import GIB


def cell_texts(plot: Plot) -> list[str]:
    """Return the texts of the cells, row by row."""
    return [mark.text for mark in flat(plot.marks) if isinstance(mark, Text)]


def strongest(plot: Plot) -> list[str]:
    """Return the trials of the cells of the strongest colour."""
    cells = [mark for mark in plot.marks if isinstance(mark, Group)]
    return [
        cell.text
        for cell in cells
        if isinstance(cell.marks[0], Path) and cell.marks[0].fill == Color("c0", BEST_SHARE)
    ]


def test_the_map_is_over_the_two_settings_with_the_largest_effect(tmp_path) -> None:
    shown = heat_map(write_record(tmp_path, MIXED))
    assert shown is not None
    assert (shown.x_label, shown.y_label) == ("batch", "precision")
    assert shown.unit == "best over accumulation, devices"
    assert [text for _, text in shown.x_ticks] == ["16", "64", "256"]
    assert cell_texts(shown) == ["1,546", "4,216", "OOM", "4,190", "8,363", "11,164"]


def test_a_cell_has_its_best_trial_and_the_strongest_cell_the_best_of_all(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    shown = heat_map(record)
    best = record.best()
    assert shown is not None
    assert best is not None
    assert strongest(shown) == [f"trial {best.trial}"]
    frames = [mark for mark in flat(shown.marks) if isinstance(mark, Path) and mark.stroke == BEST]
    assert len(frames) == 1


def test_a_lower_loss_is_stronger(tmp_path) -> None:
    space = {"learning_rate": (1e-4, 2e-3, 1e-1), "workers": (1, 2)}
    record = write_record(tmp_path, FakeSweep(objective="validation_loss", space=space))
    shown = heat_map(record)
    best = record.best()
    assert shown is not None
    assert best is not None
    assert strongest(shown) == [f"trial {best.trial}"]
    assert best.validation_loss == min(row.validation_loss or 9e9 for row in record.rows)


@pytest.mark.parametrize(
    ("sweep", "text"),
    [
        (FakeSweep(space={"workers": (1, 16)}), "infeasible"),
        (FakeSweep(space={"workers": (1, 2)}, failing=(2,)), "failed"),
        (FakeSweep(space={"batch_size": (16, 64)}, memory=3 * GIB), "OOM"),
        (FakeSweep(space={"workers": (1, 2)}, stopped=(2,)), "stopped"),
    ],
)
def test_a_cell_without_a_result_says_why(tmp_path, sweep, text) -> None:
    shown = heat_map(write_record(tmp_path, sweep))
    assert shown is not None
    assert cell_texts(shown)[1] == text


def test_without_swept_settings_or_results_there_is_no_map(tmp_path) -> None:
    assert heat_map(write_record(tmp_path / "a", ONE)) is None
    assert heat_map(write_record(tmp_path / "b", NOTHING)) is None


def test_one_setting_gives_a_single_row(tmp_path) -> None:
    shown = heat_map(write_record(tmp_path, SINGLE))
    assert shown is not None
    assert (shown.y_label, [text for _, text in shown.y_ticks]) == ("", [""])


def test_two_hundred_trials_of_six_settings_have_a_map(tmp_path) -> None:
    assert heat_map(write_record(tmp_path, points=random_points(200))) is not None


def test_explained_variance_of_simple_groups() -> None:
    assert explained_variance([1.0, 3.0, 1.0, 3.0], [0, 0, 1, 1]) == 0.0
    assert explained_variance([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1]) == 1.0
    assert explained_variance([2.0, 2.0], [0, 0]) == 0.0
    assert explained_variance([1.0, 2.0], [0, 1]) == 1.0, "a group per value explains all"


def test_a_setting_drawn_at_random_does_not_explain_everything(tmp_path) -> None:
    record = write_record(tmp_path, points=random_points(120))
    assert setting_effect(record, "learning_rate") < 0.2 < setting_effect(record, "batch_size")


def test_many_numbers_are_binned_and_few_are_not() -> None:
    assert setting_levels([256, 16, 64, "auto"]).labels == ("16", "64", "256", "auto")
    many = setting_levels([10.0 ** (-4 + place / 10) for place in range(30)])
    assert len(many.labels) == 6
    assert len(many.places) == 30
    assert sorted(set(many.places.values())) == list(range(6))


def test_words_past_the_limit_share_a_level() -> None:
    words = setting_levels([f"word{place}" for place in range(30)])
    assert words.labels[-1] == "others"
    assert max(words.places.values()) == len(words.labels) - 1
