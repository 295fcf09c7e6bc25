"""Random runs of decisions: whatever is measured, the limits hold and every change can be carried out."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from experts.evolution.decisions import after_undo, decide, due_warmups
from experts.evolution.rules import EvolutionRules
from experts.evolution.views import Decision, ExpertView, LayerView, Matrix, PolicyState, RunView
from experts.structure import Change, LayerStructure, changed

WINDOW_STEPS = 10
NUM_WINDOWS = 25
SPARSE_TOP_K = 2


class SimulatedRun:
    """Layers that change as decided, measured at random."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        first = draw.randint(1, 6)
        least = draw.randint(1, first)
        self.rules = EvolutionRules(
            min_experts=least,
            max_experts=draw.randint(first, 9),
            birth_entropy=0.7,
            birth_overload=draw.choice([1.2, 2.0]),
            birth_patience=draw.randint(1, 2),
            stall_patience=draw.randint(1, 3),
            merge_similarity=0.5,
            prune_below=draw.choice([0.3, 0.8]),
            prune_patience=draw.randint(1, 2),
            min_age_steps=draw.choice([0, 15, 40]),
            newborn_warmup_steps=draw.choice([0, 15, 30]),
            cool_down_steps=draw.choice([0, 10, 25]),
            retry_steps=draw.choice([0, 40]),
            max_changes=draw.randint(1, 4),
        )
        self.most_experts = draw.choice([None, draw.randint(first, 9)])
        self.full = [draw.random() < 0.5 or first <= SPARSE_TOP_K for _ in range(2)]
        sizes = [draw.choice([8, 8, 16]) for _ in range(first)]
        self.layers = [LayerStructure.initial(f"moe{i}", sizes) for i in range(2)]
        self.state = PolicyState()
        self.changed_steps: list[int | None] = [None, None]

    def top_k(self, layer: int) -> int:
        return len(self.layers[layer].experts) if self.full[layer] else SPARSE_TOP_K

    def view(self, step: int) -> RunView:
        layers = tuple(self._layer_view(index, step) for index in range(len(self.layers)))
        losses = tuple(self.draw.choice([1.0, 0.9, 0.5]) for _ in range(3))
        return RunView(step, losses, layers, self.most_experts)

    def _layer_view(self, index: int, step: int) -> LayerView:
        structure = self.layers[index]
        uses = [self.draw.choice([0.0, 0.1, 1.0, 1.0, 8.0]) for _ in structure.experts]
        total = sum(uses) or 1.0
        experts = [
            ExpertView(e.id, e.size, use / total, step - e.born_step, step < e.warm_step, e.hosts, e.twin_of)
            for e, use in zip(structure.experts, uses, strict=True)
        ]
        return LayerView(
            layer=index,
            name=structure.name,
            experts=tuple(experts),
            top_k=self.top_k(index),
            next_id=structure.next_id,
            entropy=self.draw.choice([0.5, 0.9]),
            tokens=self.draw.choice([1000, 1000, 1]),
            weight_similarity=self._similarity(len(experts)),
            response_similarity=self._similarity(len(experts)),
        )

    def _similarity(self, size: int) -> Matrix:
        return tuple(tuple(self.draw.choice([0.2, 0.5, 0.9]) for _ in range(size)) for _ in range(size))

    def carry_out(self, change: Change, step: int) -> None:
        before = self.layers[change.layer]
        after = changed(before, change, step, self.top_k(change.layer) == len(before.experts))
        undone = change.kind != "warmed" and self.draw.random() < 0.2
        if undone:
            self.state = after_undo(self.state, before.name, change, step, self.rules)
            after = replace(before, next_id=after.next_id)
        self.layers[change.layer] = after


def check_decision(run: SimulatedRun, view: RunView, decision: Decision) -> None:
    """Check every promise about a decision against the view, by plain counting."""
    kinds = [change.kind for change in decision.changes]
    assert kinds == sorted(kinds, key=lambda kind: kind == "born"), "births come last"
    assert all(change.reason.endswith(".") for change in decision.changes)
    for layer in view.layers:
        changes = [change for change in decision.changes if change.layer == layer.layer]
        check_layer(run, view, layer, changes)
        if changes:
            run.changed_steps[layer.layer] = view.step


def check_layer(run: SimulatedRun, view: RunView, layer: LayerView, changes: list[Change]) -> None:
    rules = run.rules
    experts = {expert.id: expert for expert in layer.experts}
    assert len(changes) <= rules.max_changes
    last = run.changed_steps[layer.layer]
    if changes and last is not None:
        assert view.step - last >= rules.cool_down_steps
    concerned = [i for change in changes for i in (change.ids if change.kind == "pruned" else change.parents)]
    assert len(concerned) == len(set(concerned)), "an expert takes part in one change"
    for expert in (experts[i] for i in concerned):
        assert not expert.warming
        assert expert.age_steps >= rules.min_age_steps
        assert all(other.twin_of != expert.id for other in layer.experts)
    for change in changes:
        if change.kind == "merged":
            first, second = (experts[i] for i in change.parents)
            assert first.size == second.size == change.size
            assert first.share >= second.share
            assert abs(sum(change.weights) - 1) < 1e-12
    new_ids = [change.ids[0] for change in changes if change.kind != "pruned"]
    assert new_ids == list(range(layer.next_id, layer.next_id + len(new_ids)))
    check_numbers(run, view, layer, changes)


def check_numbers(run: SimulatedRun, view: RunView, layer: LayerView, changes: list[Change]) -> None:
    """Whichever of the changes are undone, the number of experts stays within the limits."""
    births = sum(change.kind == "born" for change in changes)
    removals = len(changes) - births
    established = sum(not expert.warming for expert in layer.experts)
    if births:
        assert len(layer.experts) + births <= run.rules.max_experts
        assert view.most_experts is None or len(layer.experts) + births <= view.most_experts
    if removals:
        assert established - removals >= run.rules.min_experts
        assert run.full[layer.layer] or established - removals >= SPARSE_TOP_K + 1


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sequence_of_measurements_breaks_a_limit(seed: int) -> None:
    run = SimulatedRun(random.Random(seed))
    for window in range(1, NUM_WINDOWS + 1):
        step = window * WINDOW_STEPS
        for change in due_warmups(run.layers, step):
            run.carry_out(change, step)
        view = run.view(step)
        restored = PolicyState.from_json(json.loads(json.dumps(run.state.to_json())))
        decision = decide(view, run.state, run.rules)
        assert decision == decide(view, restored, run.rules), "a restored run decides the same"
        check_decision(run, view, decision)
        run.state = decision.state
        for change in decision.changes:
            run.carry_out(change, step)


def test_random_runs_see_every_kind_of_change() -> None:
    kinds = set()
    for seed in range(20):
        run = SimulatedRun(random.Random(seed))
        for step in range(0, 200, WINDOW_STEPS):
            warmed = due_warmups(run.layers, step)
            for change in warmed:
                run.carry_out(change, step)
            decision = decide(run.view(step), run.state, run.rules)
            run.state = decision.state
            for change in decision.changes:
                run.carry_out(change, step)
            kinds |= {(change.kind, bool(change.parents)) for change in (*warmed, *decision.changes)}
    expected = {("born", True), ("born", False), ("merged", True), ("pruned", False), ("warmed", False)}
    assert kinds == expected
