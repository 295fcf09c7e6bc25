"""The tensors of an expert that is born or merged: its weights and its optimizer state.

See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.model import fill_normal, mix
from experts.moe.routed import RoutedExperts
from experts.structure import Change
from experts.surgery.expert_transfer import ExpertTensors
from experts.surgery.optimizer_state import WEIGHTS, StateCoding, added, gradient_degree, halved


@dataclass(frozen=True)
class ExpertBuilder:
    """Builds one expert of the changed layer."""

    layer: RoutedExperts
    change: Change
    seed: int
    expert_id: int
    coding: StateCoding | None = None
    """What expands the optimizer's state, if it is in codes."""

    def build(self, sources: Sequence[ExpertTensors]) -> ExpertTensors:
        make = self._maker()
        if make is None:
            return sources[0]
        if self.coding is None:
            return make(*sources)
        made = make(*(_by_role(source, self.coding.expanded) for source in sources))
        return _by_role(made, self.coding.compressed)

    def _maker(self) -> Callable[..., ExpertTensors] | None:
        """Return what makes the expert from its sources; None for one that stays as it is."""
        change = self.change
        is_new = self.expert_id in change.ids
        if change.kind == "merged" and is_new:
            return self._merge
        if change.kind != "born":
            return None
        if is_new and not change.parents:
            return self._fresh
        if is_new or self.expert_id in change.parents:
            return self._half if self.layer.chooses_all else _twin
        return None

    def _merge(self, first: ExpertTensors, second: ExpertTensors) -> ExpertTensors:
        """Return one expert for the tokens of two, with the mean of their weights by use."""
        total = sum(self.change.weights)
        share = self.change.weights[0] / total if total else 0.5
        same_tokens = self.layer.chooses_all
        tensors: ExpertTensors = {}
        for (slot, role), tensor in first.items():
            other = second[slot, role]
            if not tensor.ndim:
                tensors[slot, role] = tensor
            elif slot in WEIGHTS:
                # Weights in bf16 are rounded once, to the nearest.
                wide = torch.promote_types(tensor.dtype, torch.float32)
                mean = tensor.to(wide) * share + other.to(wide) * (1 - share)
                tensors[slot, role] = mean.to(tensor.dtype)
            else:
                tensors[slot, role] = added(slot, tensor, other, same_tokens=same_tokens)
        return tensors

    def _fresh(self, like: ExpertTensors) -> ExpertTensors:
        """Return an expert with initial weights.

        Averages of squared gradients are those of another expert: from zero, with a step counter that is
        past its first steps, an optimizer's first updates would be too large."""
        tensors: ExpertTensors = {}
        for (slot, role), tensor in like.items():
            if slot in WEIGHTS:
                tensors[slot, role] = self._initial(role, like["", role]).to(tensor.dtype)
            elif tensor.ndim and gradient_degree(slot) == 1:
                tensors[slot, role] = torch.zeros_like(tensor)
            else:
                tensors[slot, role] = tensor
        return tensors

    def _half(self, parent: ExpertTensors) -> ExpertTensors:
        """Return one half of a split expert: every second hidden unit, with twice its output.

        The other units start afresh with an output of zero. Two such halves, each with half of the
        parent's weight in the gate, compute what the parent did. The gradient of a doubled output is half
        of what it was."""
        offset = int(self.expert_id in self.change.ids)
        tensors: ExpertTensors = {}
        for (slot, role), tensor in parent.items():
            if not tensor.ndim:
                tensors[slot, role] = tensor
                continue
            hidden = tensor.shape[0] if role == "down" else _units(tensor, self.layer.bank.kind)
            kept_H = torch.arange(hidden, device=tensor.device) % 2 == offset
            if role == "down":
                is_weight = slot in WEIGHTS
                half = tensor * 2 if is_weight else halved(slot, tensor, same_tokens=True)
                other = torch.zeros_like(tensor) if is_weight else _emptied(slot, tensor)
                tensors[slot, role] = torch.where(kept_H.unsqueeze(1), half, other)
            else:
                kept = kept_H if tensor.shape[1] == hidden else kept_H.repeat(2)
                other = self._initial(role, parent["", role]) if slot in WEIGHTS else _emptied(slot, tensor)
                tensors[slot, role] = torch.where(kept, tensor, other.to(tensor.dtype))
        return tensors

    def _initial(self, role: str, like: Tensor) -> Tensor:
        weight = torch.empty_like(like)
        seed = mix(self.seed, f"{self.layer.layer_name}.bank", self.expert_id, role, self.change.ids[0])
        fill_normal(weight, weight.shape[0] ** -0.5, seed)
        return weight


def _by_role(
    expert: ExpertTensors, convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
) -> ExpertTensors:
    """Return an expert with the optimizer's state of each role converted, as one row of its stack."""
    converted: ExpertTensors = {}
    for role in dict.fromkeys(role for _, role in expert):
        slots = {slot: tensor for (slot, of), tensor in expert.items() if of == role}
        weights = slots.pop("")
        rows = convert(
            {slot: tensor.unsqueeze(0) if tensor.ndim else tensor for slot, tensor in slots.items()}
        )
        converted["", role] = weights
        converted |= {(slot, role): tensor[0] if tensor.ndim else tensor for slot, tensor in rows.items()}
    return converted


def _units(up: Tensor, kind: str) -> int:
    """Return the hidden units of an expert. SwiGLU has two columns for each."""
    return up.shape[1] // 2 if kind == "swiglu" else up.shape[1]


def _twin(parent: ExpertTensors) -> ExpertTensors:
    """Return an expert that has half of the parent's tokens: the twin, and from now on the parent."""
    return {
        (slot, role): tensor
        if slot in WEIGHTS or not tensor.ndim
        else halved(slot, tensor, same_tokens=False)
        for (slot, role), tensor in parent.items()
    }


def _emptied(slot: str, tensor: Tensor) -> Tensor:
    """Return a tensor of the optimizer for weights that start afresh.

    Averages of squares stay: they tell the scale of the gradients to come."""
    return tensor if gradient_degree(slot) == 2 else torch.zeros_like(tensor)
