"""Each sign for a birth, a merge and a prune, at its threshold and just beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from experts.evolution.decisions import decide
from experts.evolution.views import LayerState, PolicyState
from harness.moe.evolution import (
    EVEN,
    RULES,
    after_windows,
    make_layer,
    make_similar,
    make_view,
    similarity,
    the_change,
    with_expert,
)


def test_a_layer_without_a_sign_is_left_alone() -> None:
    decision = after_windows(make_layer(EVEN), 4)
    assert decision.changes == ()
    assert decision.state.layers["moe"] == LayerState()


# --- birth


def test_uncertain_routing_splits_the_most_used_expert_after_the_patience() -> None:
    layer = make_layer([0.2, 0.3, 0.3, 0.2], entropy=0.91)
    change = the_change(after_windows(layer, 2))
    assert (change.kind, change.ids, change.parents, change.hosts) == ("born", (4,), (1,), ())
    assert (change.size, change.warmup_steps, change.layer) == (8, 50, 0)
    for figure in ("0.910", "0.9,", "2 windows", "30%", "Expert 1"):
        assert figure in change.reason


def test_entropy_at_the_threshold_is_not_uncertain() -> None:
    assert after_windows(make_layer(EVEN, entropy=0.9), 4).changes == ()


def test_one_certain_window_resets_the_streak() -> None:
    first = decide(make_view(make_layer(EVEN, entropy=1.0)), PolicyState(), RULES)
    second = decide(make_view(make_layer(EVEN, entropy=0.5), loss=0.9), first.state, RULES)
    third = decide(make_view(make_layer(EVEN, entropy=1.0), loss=0.8), second.state, RULES)
    assert third.changes == ()
    assert third.state.layers["moe"].uncertain == 1


def test_a_single_expert_is_never_uncertain() -> None:
    assert after_windows(make_layer([1.0], entropy=1.0), 4).changes == ()


def test_an_overloaded_expert_is_split() -> None:
    change = the_change(after_windows(make_layer([0.1, 0.1, 0.29, 0.51]), 2))
    assert (change.kind, change.parents) == ("born", (3,))
    for figure in ("51%", "2 × the even share of 25%", "2 windows"):
        assert figure in change.reason


def test_a_share_at_the_factor_is_no_overload() -> None:
    assert after_windows(make_layer([0.1, 0.1, 0.3, 0.5]), 4).changes == ()


def test_overload_comes_before_uncertainty_and_both_make_one_birth() -> None:
    layer = make_layer([0.1, 0.1, 0.29, 0.51], entropy=0.99)
    change = the_change(after_windows(layer, 2, replace(RULES, max_changes=3)))
    assert change.parents == (3,)
    assert "overloaded" in change.reason


def test_a_stalled_loss_adds_a_fresh_expert_of_the_most_used_ones_size() -> None:
    layer = with_expert(make_layer([0.2, 0.2, 0.4, 0.2]), 2, size=24)
    state = PolicyState()
    for loss in (1.0, 0.995, 0.991):  # the best stays 1.0: none is more than 1% below it
        decision = decide(make_view(layer, loss=loss), state, RULES)
        assert decision.changes == ()
        state = decision.state
    change = the_change(decide(make_view(layer, loss=0.99), state, RULES))
    assert (change.kind, change.parents, change.size, change.ids) == ("born", (), 24, (4,))
    for figure in ("0.99 ", "1%", "best of 1,", "3 windows"):
        assert figure in change.reason


def test_a_stall_grows_the_layer_with_the_fewest_experts() -> None:
    layers = [replace(make_layer([1 / n] * n), layer=i, name=f"moe{i}") for i, n in enumerate((5, 3, 3))]
    decision = decide(make_view(*layers), PolicyState(best_loss=1.0, stalled=9), RULES)
    assert the_change(decision).layer == 1
    assert decision.state.stalled == 0


def test_a_stall_waits_while_another_sign_is_answered() -> None:
    layer = make_layer(EVEN, entropy=1.0)
    state = PolicyState({"moe": LayerState(uncertain=1)}, best_loss=1.0, stalled=9)
    decision = decide(make_view(layer), state, replace(RULES, max_changes=3))
    assert "uncertain" in the_change(decision).reason
    assert decision.state.stalled == 0


def test_signs_for_a_birth_do_not_count_while_a_newborn_warms_up() -> None:
    layer = with_expert(make_layer([0.6, 0.1, 0.1, 0.2], entropy=1.0), 3, warming=True, age_steps=10)
    decision = after_windows(layer, 4)
    assert decision.changes == ()
    assert decision.state.layers["moe"] == LayerState()


@pytest.mark.parametrize(
    ("fields", "most"), [({"max_experts": 4}, None), ({}, 4), ({"max_experts": 4}, 9), ({}, 3)]
)
def test_no_expert_is_born_above_the_limits(fields: dict[str, Any], most: int | None) -> None:
    layer = make_layer([0.1, 0.1, 0.2, 0.6], entropy=1.0)
    state = PolicyState(
        {"moe": LayerState(uncertain=9, overloaded={3: 9})},
        best_loss=1.0,
        stalled=9,
    )
    rules = replace(RULES, **fields)
    assert decide(make_view(layer, most=most), state, rules).changes == ()
    at_limit = min(rules.max_experts, most or 99)
    if at_limit == 4:
        assert decide(make_view(layer, most=5), state, RULES).changes


def test_a_merge_at_the_same_decision_makes_no_room_for_a_birth() -> None:
    """The merge may be undone, and the layer would have one expert too many."""
    layer = make_similar(make_layer(EVEN, entropy=1.0), _01=0.99)
    state = PolicyState({"moe": LayerState(uncertain=9)})
    rules = replace(RULES, max_changes=2, max_experts=4)
    assert [change.kind for change in decide(make_view(layer), state, rules).changes] == ["merged"]


# --- merge


def test_the_most_similar_pair_is_merged_by_use() -> None:
    layer = make_similar(make_layer([0.1, 0.2, 0.3, 0.4]), _01=0.96, _02=0.97, _13=0.96)
    change = the_change(after_windows(layer, 1))
    assert (change.kind, change.ids, change.parents, change.size) == ("merged", (4,), (2, 0), 8)
    assert change.weights == pytest.approx((0.75, 0.25))
    for figure in ("0.970", "0.95", "30%", "10%"):
        assert figure in change.reason


def test_of_equally_similar_pairs_the_lowest_ids_are_merged() -> None:
    layer = make_similar(make_layer(EVEN), _23=0.97, _02=0.97, _13=0.97)
    assert the_change(after_windows(layer, 1)).parents == (0, 2)


def test_ids_are_told_from_rows() -> None:
    layer = make_similar(make_layer([0.2, 0.3, 0.5]), _02=0.97)
    shuffled = [replace(layer.experts[row], id=new_id) for row, new_id in enumerate((7, 3, 5))]
    layer = replace(layer, experts=tuple(shuffled), next_id=9)
    change = the_change(after_windows(layer, 1))
    assert (change.parents, change.ids) == ((5, 7), (9,))


def test_experts_without_use_are_merged_in_equal_parts() -> None:
    layer = make_similar(make_layer([0.0, 0.0, 0.5, 0.5]), _01=1.0)
    assert the_change(after_windows(layer, 1)).weights == (0.5, 0.5)


def test_a_copy_has_time_to_become_different_before_it_is_merged() -> None:
    """Else a split, whose halves are equal at first, would be undone at the next sleep."""
    rules = replace(RULES, newborn_warmup_steps=25)
    layer = make_similar(make_layer(EVEN), _03=0.99)
    young = with_expert(layer, 3, age_steps=299, split_from=0)
    assert after_windows(young, 2, rules).changes == ()
    old = with_expert(layer, 3, age_steps=300, split_from=0)
    assert the_change(after_windows(old, 1, rules)).parents == (0, 3)
    merged = with_expert(layer, 3, age_steps=299)
    assert the_change(after_windows(merged, 1, rules)).parents == (0, 3), "it was no copy"


@pytest.mark.parametrize("low", ["weight_similarity", "response_similarity"])
@pytest.mark.parametrize("value", [0.949, math.nan, -1.0])
def test_both_similarities_must_reach_the_threshold(low: str, value: float) -> None:
    layer = make_similar(make_layer(EVEN), _01=0.95)
    assert the_change(after_windows(layer, 1)).kind == "merged", "the threshold itself is enough"
    below: dict[str, Any] = {low: similarity(4, _01=value)}
    unmeasured: dict[str, Any] = {low: ()}
    assert after_windows(replace(layer, **below), 2).changes == ()
    assert after_windows(replace(layer, **unmeasured), 2).changes == (), "not measured"


@pytest.mark.parametrize(
    "fields", [{"size": 9}, {"warming": True}, {"age_steps": 99}, {"warming": True, "twin_of": 0}]
)
def test_an_expert_of_another_size_or_a_young_one_is_not_merged(fields: dict[str, Any]) -> None:
    layer = make_similar(make_layer(EVEN), _01=1.0)
    assert after_windows(with_expert(layer, 1, **fields), 2).changes == ()
    assert the_change(after_windows(with_expert(layer, 1, age_steps=100), 1)).kind == "merged"


def test_the_parent_of_a_twin_is_not_merged() -> None:
    layer = make_similar(make_layer(EVEN), _01=1.0)
    assert after_windows(with_expert(layer, 3, warming=True, twin_of=0), 2).changes == ()
    assert after_windows(with_expert(layer, 3, warming=True, twin_of=2), 1).changes


# --- prune


def test_a_dormant_expert_is_pruned_after_the_patience() -> None:
    layer = make_layer([0.4, 0.02, 0.02, 0.56])
    change = the_change(after_windows(layer, 2))
    assert (change.kind, change.ids, change.parents) == ("pruned", (1,), ())
    for figure in ("2%", "0.1 × the even share of 25%", "2 windows"):
        assert figure in change.reason


def test_a_share_at_the_fraction_is_not_dormant() -> None:
    layer = make_layer([0.25, 0.25, 0.25, 0.25 * 0.1])
    assert after_windows(layer, 4).changes == ()


def test_the_least_used_dormant_expert_goes_first() -> None:
    assert the_change(after_windows(make_layer([0.5, 0.02, 0.01, 0.47]), 2)).ids == (2,)


@pytest.mark.parametrize("fields", [{"age_steps": 99}, {"warming": True}])
def test_a_young_expert_is_never_pruned(fields: dict[str, Any]) -> None:
    layer = make_layer([0.4, 0.0, 0.3, 0.3])
    assert after_windows(with_expert(layer, 1, **fields), 5).changes == ()


def test_the_parent_of_a_twin_is_not_pruned() -> None:
    layer = with_expert(make_layer([0.4, 0.0, 0.3, 0.3]), 3, warming=True, twin_of=1)
    assert after_windows(layer, 5).changes == ()
