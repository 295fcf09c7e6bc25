"""The limits of decisions about experts: their number, the changes at once, rest, undo and warm-up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from experts.evolution.decisions import after_undo, decide, due_warmups, why_undo
from experts.evolution.views import Decision, LayerState, PolicyState
from experts.structure import Change, LayerStructure, changed
from harness.moe.evolution import (
    EVEN,
    RULES,
    after_windows,
    make_layer,
    make_similar,
    make_view,
    the_change,
    with_expert,
)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "min_experts", "removes"),
    [
        (3, 1, 2, True),
        (2, 1, 2, False),
        (2, 1, 1, False),  # one expert would leave the gate no choice
        (4, 2, 1, True),
        (3, 2, 1, False),
        (3, 3, 1, True),  # every token goes to every expert: top_k follows
        (2, 2, 1, True),
        (2, 2, 2, False),
        (1, 1, 1, False),
    ],
)
def test_merging_and_pruning_keep_enough_experts(
    num_experts: int, top_k: int, min_experts: int, removes: bool
) -> None:
    shares = [0.0] + [1 / max(1, num_experts - 1)] * (num_experts - 1)
    rules = replace(RULES, min_experts=min_experts)
    pruned = after_windows(make_layer(shares, top_k=top_k), 2, rules)
    assert bool(pruned.changes) == removes
    if num_experts > 1:
        similar = make_similar(make_layer([1 / num_experts] * num_experts, top_k=top_k), _01=1.0)
        assert bool(after_windows(similar, 1, rules).changes) == removes


def test_experts_in_warm_up_do_not_count_as_enough() -> None:
    layer = with_expert(make_layer([0.0, 0.5, 0.25, 0.25], top_k=2), 3, warming=True, twin_of=2)
    assert after_windows(layer, 3).changes == ()


def test_several_removals_stop_at_the_least_number() -> None:
    rules = replace(RULES, max_changes=9, min_experts=4, birth_overload=9.0)
    decision = after_windows(make_layer([0.0, 0.0, 0.0, 0.4, 0.3, 0.3]), 2, rules)
    assert [change.ids for change in decision.changes] == [(0,), (1,)]


# --- several changes, and rest


def test_merges_and_prunes_come_before_births_over_all_layers() -> None:
    first = make_layer(EVEN, entropy=1.0)
    second = replace(make_similar(make_layer([0.3, 0.3, 0.4, 0.0]), _01=1.0), layer=1, name="second")
    state = PolicyState({"moe": LayerState(uncertain=9), "second": LayerState(dormant={3: 9})})
    decision = decide(make_view(first, second), state, replace(RULES, max_changes=2))
    assert [(change.kind, change.layer) for change in decision.changes] == [
        ("merged", 1),
        ("pruned", 1),
        ("born", 0),
    ]


def test_new_ids_are_counted_on_within_a_decision() -> None:
    layer = make_similar(make_layer([0.05, 0.05, 0.9], next_id=7), _01=1.0)
    state = PolicyState({"moe": LayerState(overloaded={2: 9})})
    changes = decide(make_view(layer), state, replace(RULES, max_changes=2)).changes
    assert [(change.kind, change.ids) for change in changes] == [("merged", (7,)), ("born", (8,))]
    structure = replace(LayerStructure.initial("moe", [8, 8, 8]), next_id=7)
    for change in changes:
        structure = changed(structure, change, 1000)
    assert structure.ids == (7, 2, 8)


def test_a_layer_has_at_most_so_many_changes_at_once() -> None:
    layer = make_layer([0.0, 0.0, 0.5, 0.5], entropy=1.0)
    state = PolicyState({"moe": LayerState(uncertain=9, dormant={0: 9, 1: 9})})
    for most in (1, 2):
        assert len(decide(make_view(layer), state, replace(RULES, max_changes=most)).changes) == most


def test_an_expert_takes_part_in_one_change_only() -> None:
    layer = make_similar(make_layer([0.0, 0.0, 0.5, 0.5]), _01=1.0, _02=0.99)
    state = PolicyState({"moe": LayerState(dormant={0: 9, 1: 9})})
    rules = replace(RULES, max_changes=9, min_experts=1)
    changes = decide(make_view(layer), state, rules).changes
    assert [(change.kind, change.parents) for change in changes] == [("merged", (0, 1))]


def test_a_layer_rests_after_a_change() -> None:
    layer = make_layer(EVEN, entropy=1.0)
    for since, changes in ((59, False), (60, True)):
        state = PolicyState({"moe": LayerState(uncertain=9, changed_step=1000)})
        decision = decide(make_view(layer, step=1000 + since), state, RULES)
        assert bool(decision.changes) == changes


def test_a_change_is_remembered_and_its_signs_count_from_zero() -> None:
    layer = make_layer([0.1, 0.1, 0.1, 0.7], entropy=1.0)
    state = PolicyState({"moe": LayerState(uncertain=9, overloaded={3: 9}, dormant={})})
    after = decide(make_view(layer, step=1234), state, RULES).state.layers["moe"]
    assert after == LayerState(changed_step=1234)


def test_streaks_of_experts_that_are_gone_are_forgotten() -> None:
    state = PolicyState({"moe": LayerState(overloaded={9: 3}, dormant={8: 1}, barred={7: 9999})})
    assert decide(make_view(make_layer(EVEN)), state, RULES).state.layers["moe"] == LayerState()


def test_a_change_that_raises_the_loss_beyond_the_tolerance_is_undone() -> None:
    rules = replace(RULES, change_tolerance=0.1)
    assert why_undo(0.5, 0.55, rules) is None
    assert why_undo(0.5, 0.4, rules) is None
    reason = why_undo(0.5, 0.56, rules)
    assert reason is not None
    for figure in ("0.5 ", "0.56", "10%", "0.55"):
        assert figure in reason
    assert why_undo(0.5, math.nan, rules)
    assert why_undo(-1.0, -0.95, rules) is None
    assert why_undo(-1.0, -0.85, rules)


def test_the_experts_of_an_undone_change_are_left_alone_for_a_while() -> None:
    layer = make_similar(make_layer(EVEN), _01=1.0, _23=0.99)
    first = decide(make_view(layer), PolicyState(), RULES)
    state = after_undo(first.state, "moe", the_change(first), 1000, RULES)
    later = decide(make_view(layer, step=1060), state, RULES)
    assert the_change(later).parents == (2, 3)
    state = after_undo(later.state, "moe", the_change(later), 1060, RULES)
    assert decide(make_view(layer, step=1999), state, RULES).changes == ()
    assert the_change(decide(make_view(layer, step=2000), state, RULES)).parents == (0, 1)


def test_an_undone_prune_bars_the_expert() -> None:
    change = Change("pruned", 0, (2,), "")
    assert after_undo(PolicyState(), "moe", change, 5, RULES).layers["moe"].barred == {2: 1005}


def test_twins_are_warmed_when_their_time_is_over() -> None:
    layer = LayerStructure.initial("moe", [8, 8, 8])
    split = Change("born", 1, (3,), "", parents=(1,), size=8, warmup_steps=50)
    twin = changed(layer, split, 100)
    fresh = changed(layer, replace(split, parents=()), 100)
    assert due_warmups([layer, twin, fresh], 149) == ()
    change = the_change(Decision(due_warmups([layer, twin, fresh], 150), PolicyState()))
    assert (change.kind, change.layer, change.ids) == ("warmed", 1, (3,))
    assert "50 steps" in change.reason
    assert due_warmups([changed(twin, change, 150)], 150) == ()


def test_a_stall_adds_no_expert_to_a_layer_with_a_newborn() -> None:
    layer = with_expert(make_layer(EVEN), 3, warming=True)
    state = PolicyState(best_loss=1.0, stalled=9)
    assert decide(make_view(layer), state, RULES).changes == ()


def test_several_births_stop_at_the_limit() -> None:
    state = PolicyState({"moe": LayerState(overloaded={0: 9, 1: 9})})
    layer = make_layer([0.45, 0.45, 0.025, 0.025, 0.05])
    rules = replace(RULES, max_changes=9, max_experts=6)
    births = decide(make_view(layer), state, rules).changes
    assert [change.parents for change in births] == [(0,)]
    births = decide(make_view(layer), state, replace(rules, max_experts=7)).changes
    assert [change.parents for change in births] == [(0,), (1,)]


def test_a_layer_that_saw_few_tokens_is_not_changed() -> None:
    layer = make_similar(make_layer(EVEN, tokens=39), _01=1.0)
    assert decide(make_view(layer), PolicyState(best_loss=1.0, stalled=9), RULES).changes == ()


def test_a_pruned_expert_that_comes_back_is_dormant_for_no_time() -> None:
    """An undone prune brings the expert back."""
    layer = make_layer([0.0, 0.5, 0.25, 0.25])
    decision = after_windows(layer, 2)
    assert the_change(decision).kind == "pruned"
    assert decision.state.layers["moe"].dormant == {}
