"""Tests of the changes of experts that a run records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.fakes.fake_evolution import EVOLVING, EVOLVING_HOSTS, evolving_events
from harness.fakes.fake_placements import expert_event, load
from harness.runs.records import by_step, decoded, made
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.experts.expert_changes import (
    change_counts,
    expert_changes,
    final_num_experts,
    lasting_changes,
)
from orchestrator.record.summary.summary import summarise

COUNTS = {"born": 2, "warmed": 1, "merged": 1, "pruned": 1, "moved": 1, "copied": 1, "undone": 1}


def start(step: int) -> Event:
    return {"event": "start", "step": step, "strategy": "expert_parallel"}


def kinds(events: list[Event]) -> list[tuple[int, str]]:
    return [(change.step, change.change) for change in expert_changes(decoded(events))]


def test_every_field_of_a_change_is_read() -> None:
    event = expert_event(20, "merged", [5], parents=[0, 3], hosts=[[0, 2]], reason="alike", experts=4)
    change = made(event | {"loss_before": 0.5, "loss_after": "nan", "output_change": 1e-7})
    assert (change.step, change.layer, change.layer_name) == (20, 0, "blocks.0.ffn")
    assert (change.ids, change.parents, change.hosts) == ((5,), (0, 3), ((0, 2),))
    assert (change.reason, change.experts, change.seconds) == ("alike", 4, 0.01)
    assert (change.loss_before, change.output_change) == (0.5, 1e-7)


def test_an_undone_change_and_its_undoing_do_not_last() -> None:
    changes = expert_changes(decoded(evolving_events(EVOLVING_HOSTS)))
    assert [(change.step, change.change) for change in lasting_changes(changes)] == [
        (20, "born"),
        (40, "warmed"),
        (50, "merged"),
        (60, "born"),
        (80, "pruned"),
        (90, "moved"),
        (100, "copied"),
    ]
    assert change_counts(changes) == COUNTS


def test_only_the_change_directly_before_it_is_undone() -> None:
    first = expert_event(10, "born", [4], parents=[1])
    other = expert_event(10, "born", [5], parents=[2])
    changes = expert_changes(decoded([first, other, other | {"change": "undone"}]))
    assert [change.ids for change in lasting_changes(changes)] == [(4,)]
    assert (
        lasting_changes(expert_changes(decoded([first, other, first | {"change": "undone"}]))) == changes[:2]
    )


def test_the_summary_has_the_number_of_experts_and_the_counts_of_changes() -> None:
    summary = summarise(decoded(evolving_events(EVOLVING_HOSTS)))
    assert summary["experts"] == [3, 5]
    assert summary["expert_changes"] == COUNTS
    fixed = summarise(
        decoded([event for event in evolving_events() if event["event"] not in ("expert", "load")])
    )
    assert (fixed["experts"], fixed["expert_changes"]) == ([], {})


def test_a_change_after_the_last_load_counts() -> None:
    loads = [load(10, [1, 1, 1], [1, 1])]
    changes = expert_changes(decoded([expert_event(10, "pruned", [0], experts=2)]))
    assert final_num_experts(changes, decoded(loads)) == [2, 2]
    earlier = expert_changes(decoded([expert_event(9, "pruned", [0], experts=7)]))
    assert final_num_experts(earlier, decoded(loads)) == [3, 2], "the load was counted after it"


@pytest.mark.parametrize("resume_at", [55, 75])
def test_changes_repeated_after_a_restart_count_once(resume_at: int) -> None:
    events = evolving_events(replace(EVOLVING, resume_at=resume_at))
    assert len([event for event in events if event["event"] == "expert"]) > len(kinds(events))
    assert kinds(events) == kinds(evolving_events(EVOLVING))


def test_changes_past_the_step_of_a_restart_are_discarded() -> None:
    born = expert_event(20, "born", [4])
    pruned = expert_event(30, "pruned", [1])
    assert kinds([start(0), born, pruned, start(25)]) == [(20, "born")]


def test_changes_at_the_step_of_a_restart_are_replaced_if_they_are_repeated() -> None:
    """The restored state may be from before or after the changes of its step."""
    born = expert_event(20, "born", [4])
    pruned = expert_event(20, "pruned", [1])
    failure: Event = {"event": "failure", "step": 22, "final": False}
    recovery: Event = {"event": "recovery", "step": 20}
    assert kinds([start(0), born, pruned, start(20)]) == [(20, "born"), (20, "pruned")]
    assert kinds([start(0), born, failure, recovery, born, pruned]) == [(20, "born"), (20, "pruned")]
    assert kinds([start(0), born, pruned, start(20), born]) == [(20, "born")]


@pytest.mark.parametrize(
    "fields",
    [
        {"change": "grown"},
        {"change": None},
        {"ids": None},
        {"ids": [1.5]},
        {"layer": "x"},
        {"step": None},
        {"step": True},
    ],
)
def test_malformed_events_are_left_out(fields: dict[str, Any]) -> None:
    events = [expert_event(20, "born", [4]) | fields]
    assert expert_changes(decoded(events)) == []
    assert summarise(decoded(events))["expert_changes"] == {}


def test_loads_of_evolving_runs_name_their_experts() -> None:
    """The fake run is right: it names as many ids as it counts, once the experts have changed."""
    loads = by_step(evolving_events(), "load")
    assert "ids" not in loads[0]
    for event in loads[3:]:
        assert [len(ids) for ids in event["ids"]] == [len(counts) for counts in event["loads"]]
