"""How long signs for a change have lasted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from experts.evolution.decisions import decide
from experts.evolution.views import LayerState, PolicyState
from harness.moe.evolution import (
    EVEN,
    RULES,
    after_windows,
    make_layer,
    make_view,
    with_expert,
)


def test_a_loss_that_improves_does_not_stall() -> None:
    state = PolicyState()
    for window in range(10):
        decision = decide(make_view(make_layer(EVEN), loss=0.989**window), state, RULES)
        assert decision.changes == ()
        state = decision.state
    assert state.stalled == 0


def test_the_loss_is_smoothed_over_windows() -> None:
    rules = replace(RULES, smoothed_windows=2)
    view = replace(make_view(make_layer(EVEN)), losses=(9.0, 2.0, 1.0))
    assert decide(view, PolicyState(), rules).state.best_loss == 1.5


@pytest.mark.parametrize("losses", [(), (math.nan,), (math.inf,)])
def test_a_window_without_a_finite_loss_is_no_stall(losses: tuple[float, ...]) -> None:
    state = PolicyState(best_loss=1.0, stalled=2)
    view = replace(make_view(make_layer(EVEN)), losses=losses)
    assert decide(view, state, RULES).state == replace(state, layers={"moe": LayerState()})


def test_a_falling_negative_loss_improves() -> None:
    state = PolicyState(best_loss=-1.0, stalled=2)
    assert decide(make_view(make_layer(EVEN), loss=-1.2), state, RULES).state.stalled == 0
    assert (
        decide(make_view(make_layer(EVEN), loss=-1.005), replace(state, stalled=0), RULES).state.stalled == 1
    )


def test_a_window_with_few_tokens_shows_nothing() -> None:
    layer = make_layer([0.5, 0.5, 0.0, 0.0], entropy=1.0, tokens=39)
    assert after_windows(layer, 5).state.layers["moe"] == LayerState()
    assert after_windows(replace(layer, tokens=40), 2).changes


def test_warm_up_does_not_count_as_dormant_time() -> None:
    layer = with_expert(make_layer([0.0, 0.5, 0.25, 0.25]), 0, warming=True)
    assert after_windows(layer, 3).state.layers["moe"].dormant == {}


def test_a_warm_up_resets_the_signs_for_a_birth() -> None:
    layer = with_expert(make_layer([0.6, 0.1, 0.1, 0.2], entropy=1.0), 3, warming=True)
    state = PolicyState({"moe": LayerState(uncertain=1, overloaded={0: 1})})
    assert decide(make_view(layer), state, RULES).state.layers["moe"] == LayerState()
