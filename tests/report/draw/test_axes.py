"""Tests of bounds, ticks and labels of axes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.report.draw.axes import Axis, step_axis, tick_text, ticks, value_axis

VALUES = st.lists(st.floats(-1e90, 1e90), min_size=0, max_size=20)


@given(VALUES, st.booleans())
def test_every_value_has_a_place_within_the_frame(values, from_zero):
    axis = value_axis(values, from_zero)
    assert axis.high > axis.low
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert len(axis.labels) == len(axis.ticks) <= 12


@given(st.lists(st.integers(0, 2**40), max_size=20), st.booleans())
def test_a_step_axis_labels_whole_numbers_only(steps, bars):
    axis = step_axis(map(float, steps), bars)
    assert axis.high > axis.low
    assert all(mark == int(mark) for mark in axis.ticks)
    assert 1 <= len(axis.ticks) <= 7


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 10))
def test_ticks_lie_within_the_bounds_and_are_not_too_many(low, span, max_count):
    marks = ticks(low, low + span, max_count)
    # Far from zero, neighbouring floats lie further apart than a millionth of a short span.
    slack = span * 1e-6 + 4 * math.ulp(abs(low) + span)
    assert len(marks) <= max_count
    assert all(low - slack <= mark <= low + span + slack for mark in marks)


def test_a_wide_positive_range_is_logarithmic_and_a_narrow_one_is_not():
    assert value_axis([0.01, 2.0]).log
    assert not value_axis([0.5, 2.0]).log
    assert not value_axis([0.01, 2.0], from_zero=True).log
    assert not value_axis([-1.0, 100.0]).log


def test_a_logarithmic_axis_has_a_limited_range():
    axis = value_axis([1.0, 0.5, 1e-30])
    assert axis.low > 1e-6
    assert axis.place(1e-30) == 0


def test_a_known_top_is_kept_unless_exceeded():
    assert value_axis([40, 97], from_zero=True, top=100).high == 100
    assert value_axis([40, 140], from_zero=True, top=100).high > 140


def test_labels_are_short_and_distinct():
    assert [tick_text(value) for value in (0, 0.25, 1234, 20_000, 1.5e6, 3e-4)] == [
        "0",
        "0.25",
        "1234",
        "20k",
        "1.5M",
        "3e-4",
    ]
    axis = Axis(100_000, 100_040, False, (100_000, 100_020, 100_040))
    assert axis.labels == ["100000", "100020", "100040"]


def test_a_single_step_and_a_single_bar_are_in_the_middle():
    assert step_axis([7.0]).place(7.0) == 0.5
    assert step_axis([1.0], bars=True).place(1.0) == 0.5
    assert math.isclose(step_axis([1.0], bars=True).high - step_axis([1.0], bars=True).low, 5)
