"""What the heat map, the parallel coordinates and the scaling picture show, and that they can be drawn of any sweep."""

from dataclasses import replace
from itertools import pairwise

import pytest

from orchestrator.report.sweep.heatmap import effect, explained, heat_map, levels_of
from orchestrator.report.sweep.parallel_coords import NEAR, numeric_scale, parallel, word_scale
from orchestrator.report.sweep.plots import (
    MOST_SERIES,
    draw_pictures,
    heat_figure,
    scaling_figure,
    shown_series,
)
from tests.support.fake_sweep import (
    EXPERTS,
    GIB,
    HOSTILE,
    MIXED,
    NOTHING,
    ONE,
    SINGLE,
    SWEEPS,
    FakeSweep,
    write_record,
    random_points,
)

DRAWN = {
    "mixed": ["scaling.png", "heatmap.png", "parallel_coordinates.png"],
    "one": [],
    "single": ["heatmap.png", "parallel_coordinates.png"],
    "nothing": [],
    "hostile": ["scaling.png", "heatmap.png", "parallel_coordinates.png"],
    "empty": [],
}


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_drawn_where_there_is_something_to_see(tmp_path, name) -> None:
    written = draw_pictures(write_record(tmp_path, SWEEPS[name]), tmp_path)
    assert [path.name for path in written] == DRAWN[name]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_picture_that_is_out_of_date_goes(tmp_path) -> None:
    (tmp_path / "scaling.png").write_bytes(b"old")
    draw_pictures(write_record(tmp_path, ONE), tmp_path)
    assert not (tmp_path / "scaling.png").exists()


def test_the_scaling_picture_shows_both_kinds(tmp_path) -> None:
    record = write_record(tmp_path, EXPERTS)
    shown = shown_series(record)
    assert len(shown) == MOST_SERIES
    assert {series.kind for series in shown} == {"strong", "weak"}
    figure = scaling_figure(record)
    assert figure is not None
    speed, efficiency = figure.axes
    styles = {line.get_label(): line.get_linestyle() for line in speed.get_lines()}
    assert styles["ideal"] == ":" or styles["ideal"] == "--"
    assert len(speed.containers) == len(efficiency.containers) == MOST_SERIES, "each with its error bars"


def test_the_heat_map_is_over_the_two_settings_that_matter_most(tmp_path) -> None:
    found = heat_map(write_record(tmp_path, MIXED))
    assert found is not None
    assert {found.x, found.y} == {"batch_size", "precision"}
    assert set(found.others) == {"accumulation_steps", "workers"}
    assert found.columns == ("16", "64", "256")
    assert [[cell.text for cell in line] for line in found.cells] == [
        ["1,546", "4,216", "OOM"],
        ["4,190", "8,363", "11,164"],
    ]


def test_a_cell_has_the_best_over_the_rest_and_the_best_cell_is_the_best_trial(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    found, best = heat_map(record), record.best()
    assert found is not None
    assert best is not None
    strongest = [cell for line in found.cells for cell in line if cell.strength == 1]
    assert [(cell.trial, cell.value) for cell in strongest] == [(best.trial, best.samples_per_second)]


def test_a_lower_loss_is_stronger(tmp_path) -> None:
    record = write_record(
        tmp_path,
        FakeSweep(
            objective="validation_loss", space={"learning_rate": (1e-4, 2e-3, 1e-1), "workers": (1, 2)}
        ),
    )
    found = heat_map(record)
    assert found is not None
    cells = [cell for line in found.cells for cell in line if cell.value is not None]
    assert max(cells, key=lambda cell: cell.strength).value == min(
        cell.value for cell in cells if cell.value is not None
    )


@pytest.mark.parametrize(
    ("sweep", "short"),
    [
        (FakeSweep(space={"workers": (1, 16)}), "infeasible"),
        (FakeSweep(space={"workers": (1, 2)}, failing=(2,)), "failed"),
        (FakeSweep(space={"batch_size": (16, 64)}, memory=3 * GIB), "OOM"),
        (FakeSweep(space={"workers": (1, 2)}, stopped=(2,)), "stopped"),
    ],
)
def test_a_cell_without_a_result_says_why(tmp_path, sweep, short) -> None:
    found = heat_map(write_record(tmp_path, sweep))
    assert found is not None
    assert [cell.text for cell in found.cells[0]][1] == short


def test_no_grid_where_nothing_was_swept_or_measured(tmp_path) -> None:
    assert heat_map(write_record(tmp_path / "a", ONE)) is None
    assert heat_map(write_record(tmp_path / "b", NOTHING)) is None
    assert parallel(write_record(tmp_path / "c", ONE)) is None


def test_a_setting_that_explains_nothing_has_no_effect() -> None:
    assert explained([[1.0, 3.0], [1.0, 3.0]]) == 0.0
    assert explained([[1.0, 1.0], [3.0, 3.0]]) == 1.0
    assert explained([[2.0, 2.0]]) == 0.0


def test_a_setting_drawn_at_random_does_not_explain_everything(tmp_path) -> None:
    record = write_record(tmp_path, points=random_points(120))
    assert effect(record, "learning_rate") < 0.2 < effect(record, "batch_size")


def test_many_numbers_go_into_bins_and_few_stay() -> None:
    assert levels_of([256, 16, 64, "auto"]).labels == ("16", "64", "256", "auto")
    many = levels_of([10.0 ** (-4 + place / 10) for place in range(30)])
    assert len(many.labels) == 6
    assert len(many.places) == 30
    assert sorted(set(many.places.values())) == list(range(6))
    words = levels_of([f"word{place}" for place in range(30)])
    assert words.labels[-1] == "others"
    assert max(words.places.values()) == len(words.labels) - 1


def test_numbers_that_span_much_go_by_their_logarithm() -> None:
    assert numeric_scale("x", [1, 2, 4, 8]).places == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert numeric_scale("x", [1, 2, 4, 7]).places == pytest.approx((0, 1 / 6, 1 / 2, 1))
    assert numeric_scale("x", [0, 1, 100]).places == pytest.approx((0, 0.01, 1)), "nought has no logarithm"
    assert numeric_scale("x", [5, 5]).marks == ((0.5, "5"),)


def test_marks_do_not_touch_and_both_ends_are_told() -> None:
    for values in (
        [1, 1.01, 1.02, 5, 5.01],
        [place / 3 for place in range(500)],
        [10.0**-place for place in range(9)],
    ):
        places = [place for place, _ in numeric_scale("x", values).marks]
        assert all(b - a >= NEAR for a, b in pairwise(places))
    assert [text for _, text in numeric_scale("x", [1, 1.01, 1.02, 5, 5.01]).marks] == ["1", "5.01"]


def test_words_and_numbers_share_an_axis() -> None:
    scale = word_scale("batch", ["auto", 64, 16, None, True])
    assert [text for _, text in scale.marks][:2] == ["16", "64"]
    assert len(set(scale.places)) == 5


def test_lines_go_from_the_worst_to_the_best(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    found, best = parallel(record), record.best()
    assert found is not None
    assert best is not None
    assert found.lines[-1].row.trial == best.trial
    assert found.lines[-1].strength == 1
    assert [scale.name for scale in found.scales] == [
        "precision",
        "batch",
        "accumulation",
        "devices",
        "samples/s",
    ]
    assert len(found.lines) == sum(row.status == "completed" for row in record.rows)
    through = [line.places[0] for line in found.lines if line.row.point["precision"] == "fp32"]
    assert len(set(through)) == len(through), "lines through one value lie side by side"


def test_two_hundred_trials_of_six_settings(tmp_path) -> None:
    record = write_record(tmp_path, points=random_points(200))
    found = parallel(record)
    assert found is not None
    assert len(found.scales) == 7
    assert heat_figure(record) is not None


def test_one_setting_is_a_strip(tmp_path) -> None:
    found = heat_map(write_record(tmp_path, SINGLE))
    assert found is not None
    assert (found.y, len(found.cells)) == ("", 1)


def test_hostile_names_are_no_formulas(tmp_path) -> None:
    record = write_record(tmp_path, replace(HOSTILE, failing=()))
    assert len(draw_pictures(record, tmp_path)) == 3
