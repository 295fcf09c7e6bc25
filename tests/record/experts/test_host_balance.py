"""Tests of the balance of hosts, against figures computed by hand."""

import pytest

from harness.fakes.fake_placements import LAYER, expert_event, load, placement_event
from harness.runs.records import decoded, made
from orchestrator.record.experts.host_balance import (
    even_ratios,
    mean_per_step,
    settled_imbalance,
    token_counts,
)


def test_over_a_run_the_slowest_times_are_summed() -> None:
    """The second half counts: how the gate settled, not how it began."""
    loads = [load(1, [600, 0, 0]), load(2, [0, 0, 200]), load(3, [6, 3, 2]), load(4, [12, 3, 2])]
    assert settled_imbalance(decoded([placement_event(LAYER)]), decoded(loads)) == pytest.approx(
        (60 + 120) / (60 + 80)
    )
    assert settled_imbalance(decoded([placement_event(LAYER)]), []) is None
    assert settled_imbalance([], decoded(loads)) is None


def test_malformed_counts_are_zero() -> None:
    assert token_counts(made(load(1, [3, "x", -1, None, "nan"], None, "x"))) == [
        {0: 3, 1: 0, 2: 0, 3: 0, 4: 0},
        {},
        {},
    ]
    assert token_counts(made({"event": "load", "step": 1, "loads": "x"})) == []


def test_counts_go_by_the_ids_of_the_event() -> None:
    assert token_counts(made(load(1, [3, 4], [5], ids=[[2, 7], [0]]))) == [{2: 3, 7: 4}, {0: 5}]
    assert token_counts(made(load(1, [3, 4], [5], ids=[[2, 7]]))) == [{2: 3, 7: 4}, {0: 5}]
    for ids in ("x", [[2]], [[2, 2]], [["a", 7]], [[-1, 2]], [None]):
        assert token_counts(made(load(1, [3, 4], ids=ids))) == [{0: 3, 1: 4}], "not the ids of these counts"


def test_the_even_share_is_that_of_the_events_that_count_the_expert() -> None:
    """Expert 2 is born in the second event: 40 of 120 among three is its even share of that event."""
    assert even_ratios([{0: 30, 1: 10}, {0: 60, 1: 20, 2: 40}]) == {0: 90 / 60, 1: 30 / 60, 2: 1.0}
    assert even_ratios([{0: 0, 1: 0}]) == {0: None, 1: None}
    assert even_ratios([{}]) == even_ratios([]) == {}


def test_means_per_step_are_weighted_by_steps() -> None:
    events = [
        {"steps": 1, "bytes": 10},
        {"steps": 3, "bytes": 30},
        {"steps": 5, "bytes": None},
        {"bytes": "x"},
    ]
    events = [{"event": "exchange", "step": 1, **fields} for fields in events]
    assert mean_per_step(decoded(events), "bytes") == 25
    assert mean_per_step(decoded(events), "seconds") is None
    assert mean_per_step(decoded([events[0] | {"steps": "x"}, events[1] | {"steps": 1}]), "bytes") == 20


def test_the_imbalance_after_a_last_change_is_still_known() -> None:
    """A change at the very end must not hide what was measured before it."""
    events = [placement_event(LAYER), expert_event(4, "moved", [1, 2], hosts=[[0], [0]])]
    loads = [load(3, [6, 3, 2]), load(4, [12, 3, 2])]
    assert settled_imbalance(decoded(events), decoded(loads)) == 120 / 80
