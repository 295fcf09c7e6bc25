"""The tensors of an expert that is born or merged: its weights and its optimizer state.

See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.layer import MoELayer
from experts.model import fill_normal, mix
from experts.structure import Change
from experts.surgery.expert_transfer import ExpertTensors

_DEGREES: Mapping[str, int] = {
    "exp_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "momentum_buffer": 1,
    "ema": 0,
}
_WEIGHTS = frozenset({"", "ema"})
"""The weights themselves, and their moving average, which changes as they do."""


@dataclass(frozen=True)
class ExpertBuilder:
    """Builds one expert of the changed layer."""

    layer: MoELayer
    change: Change
    seed: int
    expert_id: int

    def build(self, sources: Sequence[ExpertTensors]) -> ExpertTensors:
        change = self.change
        is_new = self.expert_id in change.ids
        if change.kind == "merged" and is_new:
            return self._merge(sources[0], sources[1])
        if change.kind != "born":
            return sources[0]
        if is_new and not change.parents:
            return self._fresh(sources[0])
        splits_units = bool(change.parents) and self.layer.gate.chooses_all
        if splits_units and (is_new or self.expert_id == change.parents[0]):
            return self._half(sources[0])
        return sources[0]

    def _merge(self, first: ExpertTensors, second: ExpertTensors) -> ExpertTensors:
        """Return the mean of two experts, weighted by their use."""
        total = sum(self.change.weights)
        share = self.change.weights[0] / total if total else 0.5
        return {
            key: tensor if not tensor.ndim else tensor * share + second[key] * (1 - share)
            for key, tensor in first.items()
        }

    def _fresh(self, like: ExpertTensors) -> ExpertTensors:
        """Return an expert with initial weights.

        Averages of squared gradients are those of another expert: from zero, with a step counter that is
        past its first steps, an optimizer's first updates would be too large."""
        tensors: ExpertTensors = {}
        for (slot, role), tensor in like.items():
            if slot in _WEIGHTS:
                tensors[slot, role] = self._initial(role, tensor)
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
                is_weight = slot in _WEIGHTS
                factor = 2.0 if is_weight else 0.5 ** gradient_degree(slot)
                # The averages of squares of other units stay: they tell the scale of the gradients to come.
                other = tensor if not is_weight and gradient_degree(slot) == 2 else torch.zeros_like(tensor)
                tensors[slot, role] = torch.where(kept_H.unsqueeze(1), tensor * factor, other)
            else:
                kept = kept_H if tensor.shape[1] == hidden else kept_H.repeat(2)
                other = self._initial(role, tensor) if slot in _WEIGHTS else _emptied(slot, tensor)
                tensors[slot, role] = torch.where(kept, tensor, other)
        return tensors

    def _initial(self, role: str, like: Tensor) -> Tensor:
        weight = torch.empty_like(like)
        seed = mix(self.seed, f"{self.layer.layer_name}.bank", self.expert_id, role, self.change.ids[0])
        fill_normal(weight, weight.shape[0] ** -0.5, seed)
        return weight


def _units(up: Tensor, kind: str) -> int:
    """Return the hidden units of an expert. SwiGLU has two columns for each."""
    return up.shape[1] // 2 if kind == "swiglu" else up.shape[1]


def _emptied(slot: str, tensor: Tensor) -> Tensor:
    return tensor if gradient_degree(slot) == 2 else torch.zeros_like(tensor)


def gradient_degree(slot: str) -> int:
    """Return the power of the gradient that a tensor of the optimizer grows with; 0 for averaged weights."""
    if slot not in _DEGREES:
        raise ValueError(
            f"the optimizer keeps {slot!r} of each parameter; experts can be born and merged with "
            f"{', '.join(_DEGREES)} alone: use AdamW, Adam or SGD, or --evolution off"
        )
    return _DEGREES[slot]
