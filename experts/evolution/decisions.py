"""Decides which experts are born, merged and pruned, and says why. Pure; the caller carries it out.

Each sign for a change must last for a number of windows (``streaks``), and each layer rests after a
change, so that one change is judged before the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from experts.evolution.rules import EvolutionRules
from experts.evolution.streaks import observe, shows_enough, smoothed
from experts.evolution.views import Decision, ExpertView, LayerState, LayerView, PolicyState, RunView
from experts.structure import Change, LayerStructure


def decide(view: RunView, state: PolicyState, rules: EvolutionRules) -> Decision:
    """Return the changes after a window: merges and prunes first, then births.

    The hosts of newborn experts are left to the caller."""
    state = observe(view, state, rules)
    drafts = [_Draft(layer, view, state.layers[layer.name], rules) for layer in view.layers]
    for draft in drafts:
        draft.merge()
        draft.prune()
        draft.split_overloaded()
        draft.split_uncertain()
    if state.stalled >= rules.stall_patience and not any(draft.births for draft in drafts):
        _add_fresh(drafts, view, state, rules)
    removals = [change for draft in drafts for change in draft.removals]
    births = [change for draft in drafts for change in draft.births]
    layers = {draft.layer.name: draft.next_state() for draft in drafts}
    stalled = 0 if births else state.stalled
    return Decision((*removals, *births), replace(state, layers=layers, stalled=stalled))


def due_warmups(layers: Sequence[LayerStructure], step: int) -> tuple[Change, ...]:
    """Return the changes that end the warm-up of twins after ``step`` steps."""
    return tuple(
        Change(
            "warmed", index, (expert.id,), _warmed_reason(expert.id, expert.twin_of, step, expert.born_step)
        )
        for index, layer in enumerate(layers)
        for expert in layer.experts
        if expert.twin_of is not None and step >= expert.warm_step
    )


def why_undo(loss_before: float, loss_after: float, rules: EvolutionRules) -> str | None:
    """Return the reason to undo a change by the validation losses around it; None if it may stay."""
    limit = loss_before + rules.change_tolerance * abs(loss_before)
    # In this form of the comparison, NaN exceeds the limit.
    if loss_after <= limit:
        return None
    return (
        f"The validation loss rose from {loss_before:.4g} to {loss_after:.4g}; "
        f"the tolerance of {_percent(rules.change_tolerance)} ends at {limit:.4g}."
    )


def after_undo(
    state: PolicyState, layer_name: str, change: Change, step: int, rules: EvolutionRules
) -> PolicyState:
    """Return the state after a change was undone: its experts take part in no change for a while."""
    layer = state.layers.get(layer_name, LayerState())
    experts = change.ids if change.kind == "pruned" else change.parents
    barred = dict(layer.barred) | dict.fromkeys(experts, step + rules.retry_steps)
    return replace(state, layers=dict(state.layers) | {layer_name: replace(layer, barred=barred)})


class _Draft:
    """The changes of one layer, as they are collected.

    Limits are those of the layer before all of them, since each may be undone by itself."""

    def __init__(self, layer: LayerView, view: RunView, state: LayerState, rules: EvolutionRules) -> None:
        self.layer = layer
        self.state = state
        self.removals: list[Change] = []
        self.births: list[Change] = []
        self._step = view.step
        self._rules = rules
        self._most = rules.max_experts
        if view.most_experts is not None:
            self._most = min(self._most, view.most_experts)
        self._touched: set[int] = set()
        self._next_id = layer.next_id
        self._parents_of_twins = {expert.twin_of for expert in layer.experts}

    def merge(self) -> None:
        """Merge similar pairs, the most similar first."""
        while self._may_remove():
            pair = self._most_similar_pair()
            if pair is None:
                return
            self._add_merge(*pair)

    def prune(self) -> None:
        """Prune dormant experts, the least used first."""
        while self._may_remove():
            expert = _first(self._lasting(self.state.dormant, self._rules.prune_patience), _least_used)
            if expert is None:
                return
            reason = (
                f"Expert {expert.id} is dormant: it had {_percent(expert.share)} of the use, below "
                f"{self._rules.prune_below:g} × the even share of {_percent(self.layer.even_share)}, for "
                f"{self.state.dormant[expert.id]} windows in a row (at least {self._rules.prune_patience})."
            )
            self.removals.append(Change("pruned", self.layer.layer, (expert.id,), reason))
            self._touched.add(expert.id)

    def split_overloaded(self) -> None:
        """Split overloaded experts, the most used first."""
        while self.may_grow():
            parent = _first(self._lasting(self.state.overloaded, self._rules.birth_patience), _most_used)
            if parent is None:
                return
            reason = (
                f"Expert {parent.id} is overloaded: it had {_percent(parent.share)} of the use, above "
                f"{self._rules.birth_overload:g} × the even share of {_percent(self.layer.even_share)}, for "
                f"{self.state.overloaded[parent.id]} windows in a row "
                f"(at least {self._rules.birth_patience}). It is split."
            )
            self._add_birth(parent.size, reason, (parent.id,))

    def split_uncertain(self) -> None:
        """Split the most used expert if the gate has long been uncertain."""
        lasting = self.state.uncertain >= self._rules.birth_patience
        if not lasting or self.births or not self.may_grow():
            return
        parent = _first(self._eligible(), _most_used)
        if parent is None:
            return
        reason = (
            f"Routing is uncertain: the gate's entropy was {self.layer.entropy:.3f} of its maximum, above "
            f"{self._rules.birth_entropy:g}, for {self.state.uncertain} windows in a row "
            f"(at least {self._rules.birth_patience}). "
            f"Expert {parent.id}, with {_percent(parent.share)} of the use, is split."
        )
        self._add_birth(parent.size, reason, (parent.id,))

    def add_fresh(self, reason: str) -> None:
        """Add an expert made afresh, of the size of the most used one."""
        model = min(self.layer.experts, key=_most_used)
        self._add_birth(model.size, reason)

    def may_grow(self) -> bool:
        """Whether an expert may be born."""
        # While another newborn warms up, its effect is not known.
        warming = any(expert.warming for expert in self.layer.experts)
        num_experts = len(self.layer.experts) + len(self.births)
        return self._may_change() and not warming and num_experts < self._most

    def next_state(self) -> LayerState:
        """Return what the next decision remembers: signs that were acted on count from zero."""
        if not self.removals and not self.births:
            return self.state
        return replace(
            self.state,
            uncertain=0 if self.births else self.state.uncertain,
            overloaded=self._without_touched(self.state.overloaded),
            dormant=self._without_touched(self.state.dormant),
            changed_step=self._step,
        )

    def _may_change(self) -> bool:
        last = self.state.changed_step
        rested = last is None or self._step - last >= self._rules.cool_down_steps
        num_changes = len(self.removals) + len(self.births)
        return rested and num_changes < self._rules.max_changes and shows_enough(self.layer, self._rules)

    def _may_remove(self) -> bool:
        """Whether the layer has enough experts without one of them.

        Experts in warm-up do not count: the gate may not choose them yet. A layer with top-k routing keeps
        more experts than a token needs, since the gate would have no choice otherwise."""
        established = sum(not expert.warming for expert in self.layer.experts)
        least = self._rules.min_experts
        if not self.layer.is_full:
            least = max(least, self.layer.top_k + 1)
        return self._may_change() and established - len(self.removals) > least

    def _eligible(self) -> list[ExpertView]:
        """Return the experts that a change may concern."""
        return [
            expert
            for expert in self.layer.experts
            if not expert.warming
            and expert.age_steps >= self._rules.min_age_steps
            and expert.id not in self._touched
            and expert.id not in self._parents_of_twins
            and expert.id not in self.state.barred
        ]

    def _lasting(self, streaks: Mapping[int, int], patience: int) -> list[ExpertView]:
        return [expert for expert in self._eligible() if streaks.get(expert.id, 0) >= patience]

    def _most_similar_pair(self) -> tuple[ExpertView, ExpertView] | None:
        by_id = sorted(filter(self._may_merge, self._eligible()), key=lambda expert: expert.id)
        pairs = [pair for pair in combinations(by_id, 2) if self._are_similar(*pair)]
        # The weaker one of the two similarities counts. The first of several maxima has the lowest ids.
        return max(pairs, key=lambda pair: min(self._similarities(*pair)), default=None)

    def _may_merge(self, expert: ExpertView) -> bool:
        return expert.split_from is None or expert.age_steps >= self._rules.divergence_steps

    def _are_similar(self, first: ExpertView, second: ExpertView) -> bool:
        values = self._similarities(first, second)
        return first.size == second.size and all(value >= self._rules.merge_similarity for value in values)

    def _similarities(self, first: ExpertView, second: ExpertView) -> tuple[float, float]:
        layer = self.layer
        if not layer.weight_similarity or not layer.response_similarity:
            return -math.inf, -math.inf
        row = layer.experts.index(first)
        column = layer.experts.index(second)
        return layer.weight_similarity[row][column], layer.response_similarity[row][column]

    def _add_merge(self, first: ExpertView, second: ExpertView) -> None:
        weights, responses = self._similarities(first, second)
        # The more used one keeps its row in the gate, and its host.
        kept, other = sorted((first, second), key=_most_used)
        total = kept.share + other.share
        kept_weight = kept.share / total if total > 0 else 0.5
        reason = (
            f"Experts {kept.id} and {other.id} are similar: {weights:.3f} by their weights and "
            f"{responses:.3f} by their responses, at least {self._rules.merge_similarity:g} each. "
            f"They had {_percent(kept.share)} and {_percent(other.share)} of the use."
        )
        parents = (kept.id, other.id)
        merged = Change(
            "merged",
            self.layer.layer,
            (self._next_id,),
            reason,
            parents=parents,
            size=kept.size,
            weights=(kept_weight, 1 - kept_weight),
        )
        self.removals.append(merged)
        self._touched.update(parents)
        self._next_id += 1

    def _add_birth(self, size: int, reason: str, parents: tuple[int, ...] = ()) -> None:
        warmup = self._rules.newborn_warmup_steps
        born = Change(
            "born",
            self.layer.layer,
            (self._next_id,),
            reason,
            parents=parents,
            size=size,
            warmup_steps=warmup,
        )
        self.births.append(born)
        self._touched.update(parents)
        self._next_id += 1

    def _without_touched(self, streaks: Mapping[int, int]) -> dict[int, int]:
        return {key: streak for key, streak in streaks.items() if key not in self._touched}


def _add_fresh(drafts: Sequence[_Draft], view: RunView, state: PolicyState, rules: EvolutionRules) -> None:
    """Add a fresh expert, because the loss has stalled, to the layer with the fewest experts."""
    growing = [draft for draft in drafts if draft.may_grow()]
    if not growing:
        return
    draft = min(growing, key=lambda draft: (len(draft.layer.experts), draft.layer.layer))
    reason = (
        f"The loss has stalled: {smoothed(view.losses, rules):.4g} is not more than "
        f"{_percent(rules.stall_improvement)} below the best of {state.best_loss:.4g}, for {state.stalled} "
        f"windows in a row (at least {rules.stall_patience}). {draft.layer.name} gets a fresh expert."
    )
    draft.add_fresh(reason)


def _first(
    experts: Sequence[ExpertView], order: Callable[[ExpertView], tuple[float, int]]
) -> ExpertView | None:
    return min(experts, key=order, default=None)


def _most_used(expert: ExpertView) -> tuple[float, int]:
    """Order by use, the most used first, then by id."""
    return -expert.share, expert.id


def _least_used(expert: ExpertView) -> tuple[float, int]:
    return expert.share, expert.id


def _warmed_reason(expert_id: int, parent: int | None, step: int, born_step: int) -> str:
    return (
        f"Expert {expert_id} shared the tokens of expert {parent} for {step - born_step} steps; "
        "from now on the gate learns to choose between them."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
