"""Tests of suggestions: a slip of the finger is answered, a word that means something else is not."""

from __future__ import annotations

import pytest

from orchestrator.config.names.nearest import did_you_mean, nearest, slips
from orchestrator.config.settings import flat_names, section_types


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("abc", "xabc", 1),
        ("ab", "xy", 2),
    ],
)
def test_slips_are_letters_left_out_added_replaced_or_exchanged(first: str, second: str, expected: int):
    assert slips(first, second) == expected
    assert slips(second, first) == expected


@pytest.mark.parametrize("name", ["ema", "loss"])
def test_a_word_that_means_something_else_has_no_suggestion(name: str):
    assert nearest(name, flat_names()) is None


def test_a_slip_and_the_longer_form_of_a_name_have_one():
    assert did_you_mean("epohcs", flat_names()) == " (did you mean 'epochs'?)"
    assert did_you_mean("optimizer", section_types()) == " (did you mean 'optim'?)"
