"""Changes of a gate's rows, and of their optimizer state. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experts.model import fill_normal, mix
from experts.moe.layer import MoELayer
from experts.structure import Change, LayerStructure
from experts.surgery.optimizer_state import added, coding_of, gradient_degree, halved

_GATE_STD = 0.02
_WARMED_NOISE = 0.1  # of the spread of a gate's row


def change_gate(
    layer: MoELayer, new: LayerStructure, change: Change, optimizer: torch.optim.Optimizer, seed: int
) -> None:
    """Give the gate the rows of the changed experts, with their optimizer state."""
    old = layer.structure
    gate = layer.gate
    before = gate.weight_ED
    rows = _gate_rows(old, new, change)
    # Weights in bf16 are rounded once, to the nearest.
    wide = torch.promote_types(before.dtype, torch.float32)
    weight = _combine_rows(before.detach().to(wide), rows)
    if change.kind == "born" and not change.parents:
        fill_normal(weight[-1], _GATE_STD, mix(seed, layer.layer_name, "gate", change.ids[0]))
    if change.kind == "warmed":
        _tell_apart(weight, old, change.ids[0], mix(seed, layer.layer_name, "warmed", change.ids[0]))
    gate.weight_ED = nn.Parameter(weight.to(before.dtype), requires_grad=before.requires_grad)
    state = optimizer.state.get(before)
    coding = coding_of(optimizer)
    if state is not None:
        if coding is not None:
            state = coding.expanded(state)
        halves = _halves(layer, new, change)
        unused = _unused(new, change)
        optimizer.state[gate.weight_ED] = {
            slot: _changed_slot(slot, value, rows, halves, unused)
            if _is_like(value, before)
            else _copied(value)
            for slot, value in state.items()
        }
        average = optimizer.state[gate.weight_ED].get("ema")
        if average is not None and not rows[-1]:
            average[-1] = gate.weight_ED[-1]  # a row without a source begins as its weights do
        if coding is not None:
            optimizer.state[gate.weight_ED] = coding.compressed(optimizer.state[gate.weight_ED])
    gate.bias_E = _combine_rows(gate.bias_E, rows)
    if gate.chooses_all:
        # Every expert had every token: the loads of two are not added up.
        rows = [sources[:1] for sources in rows]
    layer.load_E = _combine_loads(layer.load_E, new, rows, change)
    follow_number(layer, len(new.experts))


def follow_number(layer: MoELayer, num_experts: int) -> None:
    if layer.gate.chooses_all:
        layer.gate.top_k = num_experts


def _halves(layer: MoELayer, new: LayerStructure, change: Change) -> list[int]:
    """Return the rows of the halves of a split expert, where each has half of its weight in the gate."""
    if change.kind != "born" or not layer.gate.chooses_all:
        return []
    return [new.index(expert_id) for expert_id in (*change.parents, *change.ids)] if change.parents else []


def _unused(new: LayerStructure, change: Change) -> list[int]:
    """Return the row of an expert whose ramp begins: the gate did not use it, so it has no gradients yet."""
    begins_ramp = change.kind == "warmed" or (change.kind == "born" and not change.parents)
    return [new.index(change.ids[0])] if begins_ramp else []


def _changed_slot(
    slot: str,
    value_ED: Tensor,
    rows: Sequence[Sequence[tuple[int, float]]],
    halves: Sequence[int],
    unused: Sequence[int],
) -> Tensor:
    """Return a tensor of the optimizer for the changed rows. See ``optimizer_state``.

    The gradients of two halves add up to that of the row before, and those of merged rows to that of the
    one row: every token has a part in each row."""
    result_ED = _combine_rows(value_ED, rows)
    degree = gradient_degree(slot)
    if degree == 0:
        return result_ED
    for row, sources in enumerate(rows):
        if len(sources) == 2:
            first, second = (value_ED[source] for source, _ in sources)
            result_ED[row] = added(slot, first, second, same_tokens=True)
    for row in halves:
        result_ED[row] = halved(slot, result_ED[row], same_tokens=True)
    for row in unused:
        # The squares give the scale of coming gradients: from zero, the first updates would be too large.
        result_ED[row] = value_ED.mean(0) if degree == 2 else 0.0
    return result_ED


def _gate_rows(old: LayerStructure, new: LayerStructure, change: Change) -> list[list[tuple[int, float]]]:
    """Return the old rows, with their weights, that each new row is the sum of."""
    sources: dict[int, list[tuple[int, float]]] = {
        expert.id: [(row, 1.0)] for row, expert in enumerate(old.experts)
    }
    if change.kind == "born":
        sources[change.ids[0]] = [(old.index(change.parents[0]), 1.0)] if change.parents else []
    elif change.kind == "merged":
        total = sum(change.weights)
        shares = [weight / total for weight in change.weights] if total else [0.5, 0.5]
        first, second = (old.index(parent) for parent in change.parents)
        sources[change.ids[0]] = [(first, shares[0]), (second, shares[1])]
    elif change.kind == "warmed":
        parent = old.expert(change.ids[0]).twin_of
        assert parent is not None
        sources[change.ids[0]] = [(old.index(parent), 1.0)]
    return [sources[expert.id] for expert in new.experts]


def _combine_rows(tensor: Tensor, rows: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
    result = tensor.new_zeros(len(rows), *tensor.shape[1:])
    for number, sources in enumerate(rows):
        for row, factor in sources:
            result[number] += tensor[row] if factor == 1.0 else tensor[row] * factor
    return result


def _combine_loads(
    load_E: Tensor, new: LayerStructure, rows: Sequence[Sequence[tuple[int, float]]], change: Change
) -> Tensor:
    """Return the loads of the last step as the changed experts would have had them."""
    loads = _combine_rows(load_E, [[(row, 1.0) for row, _ in sources] for sources in rows])
    newborn = new.expert(change.ids[0]) if change.kind == "born" else None
    if newborn is not None and newborn.twin_of is not None:
        loads[-1] = 0  # its tokens were its parent's
    return loads


def _tell_apart(weight_ED: Tensor, old: LayerStructure, expert_id: int, seed: int) -> None:
    """Move the row of a twin, which is its parent's, a little: the gate then learns to tell them apart."""
    row_D = weight_ED[old.index(expert_id)]
    noise_D = torch.empty_like(row_D)
    fill_normal(noise_D, 1.0, seed)
    row_D += noise_D * row_D.std() * _WARMED_NOISE


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
