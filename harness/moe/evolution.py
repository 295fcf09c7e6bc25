"""Views of layers for tests of the decisions about experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experts.evolution.decisions import decide
from experts.evolution.rules import EvolutionRules
from experts.evolution.views import Decision, ExpertView, LayerView, PolicyState, RunView
from experts.structure import Change

EVEN = [0.25] * 4
RULES = EvolutionRules(
    min_experts=2,
    max_experts=8,
    birth_entropy=0.9,
    birth_overload=2.0,
    birth_patience=2,
    stall_patience=3,
    smoothed_windows=1,
    merge_similarity=0.95,
    prune_below=0.1,
    prune_patience=2,
    min_age_steps=100,
    newborn_warmup_steps=50,
    cool_down_steps=60,
    min_tokens_per_expert=10,
)
OLD = 1000


def make_layer(shares: Sequence[float], **fields: Any) -> LayerView:
    experts = tuple(ExpertView(i, 8, share, OLD) for i, share in enumerate(shares))
    values: dict[str, Any] = {
        "experts": experts,
        "top_k": 1,
        "next_id": len(shares),
        "entropy": 0.5,
        "tokens": 1000,
    }
    return LayerView(0, "moe", **values | fields)


def with_expert(layer: LayerView, row: int, **fields: Any) -> LayerView:
    experts = list(layer.experts)
    experts[row] = replace(experts[row], **fields)
    return replace(layer, experts=tuple(experts))


def make_view(*layers: LayerView, step: int = 1000, loss: float = 1.0, most: int | None = None) -> RunView:
    return RunView(step, (loss,), layers, most)


def after_windows(
    layer: LayerView, windows: int, rules: EvolutionRules = RULES, most: int | None = None
) -> Decision:
    """Show the same window several times, with an improving loss, and return the last decision."""
    decision = Decision((), PolicyState())
    for window in range(windows):
        assert not decision.changes, f"decided after {window} windows already"
        view = make_view(layer, step=1000 + 10 * window, loss=0.9**window, most=most)
        decision = decide(view, decision.state, rules)
    return decision


def the_change(decision: Decision) -> Change:
    (change,) = decision.changes
    return change


def similarity(size: int, **pairs: float) -> tuple[tuple[float, ...], ...]:
    """A matrix with these values: ``_02=0.9`` is rows 0 and 2."""
    rows = [[1.0 if i == j else 0.0 for j in range(size)] for i in range(size)]
    for name, value in pairs.items():
        i, j = int(name[1]), int(name[2])
        rows[i][j] = rows[j][i] = value
    return tuple(tuple(row) for row in rows)


def make_similar(layer: LayerView, **pairs: float) -> LayerView:
    matrix = similarity(len(layer.experts), **pairs)
    return replace(layer, weight_similarity=matrix, response_similarity=matrix)
