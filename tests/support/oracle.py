"""The slow, obvious form of the MoE layer, with all its options: token by token, expert by expert, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from experts.layer import MoELayer
from experts.types import Kind


def moe_oracle(
    layer: MoELayer, x_TD: Tensor, noise_TD: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Output, balance loss, z-loss and counts of one forward pass. ``noise_TD`` are the factors on what the gate sees."""
    gate, experts = layer.gate, expert_weights(layer)
    share = shares(layer.load_E.tolist())
    balance, z = x_TD.new_zeros(()), x_TD.new_zeros(())
    choices: list[list[int]] = []
    weights: list[list[Tensor]] = []
    for t, x_D in enumerate(x_TD):
        seen_D = x_D if noise_TD is None else x_D * noise_TD[t]
        logits = [(gate.weight_ED[e] * seen_D).sum() for e in range(len(experts))]
        scores = (
            [1 / (1 + (-logit).exp()) for logit in logits]
            if gate.scores == "sigmoid"
            else of_sum_one([x.exp() for x in logits])
        )
        probabilities = of_sum_one(scores)
        balance = balance + sum(probabilities[e] * share[e] for e in range(len(experts)))
        z = z + torch.stack([logit.exp() for logit in logits]).sum().log() ** 2
        bias = gate.bias_E.tolist() if gate.bias_rate else [0.0] * len(experts)
        order = sorted(range(len(experts)), key=lambda e: -(scores[e].item() + bias[e]))
        choices.append(order[: gate.top_k])
        mine = [scores[e] for e in choices[-1]]
        weights.append(of_sum_one(mine) if gate.normalise and gate.top_k > 1 else mine)
    kept = kept_oracle(choices, len(experts), layer.capacity)
    rows: list[Tensor] = []
    for t, x_D in enumerate(x_TD):
        out = torch.zeros_like(x_D)
        for k, e in enumerate(choices[t]):
            if kept[t][k]:
                out = out + weights[t][k] * expert_oracle(x_D, *experts[e], layer.bank.kind)
        if layer.shared is not None:
            out = out + expert_oracle(
                x_D, layer.shared.up.weight.t(), layer.shared.down.weight.t(), layer.shared.kind
            )
        rows.append(out)
    counts = [sum(chosen.count(e) for chosen in choices) for e in range(len(experts))]
    return torch.stack(rows) if rows else x_TD, balance, z, counts


def kept_oracle(choices: Sequence[Sequence[int]], experts: int, capacity: float | None) -> list[list[bool]]:
    """Which choices there is room for: all first choices in the order of tokens, then all second ones, and so on, while an
    expert has fewer than ``capacity`` times its even share."""
    kept = [[True] * len(chosen) for chosen in choices]
    if capacity is None or not choices:
        return kept
    top_k = len(choices[0])
    room = math.ceil(capacity * len(choices) * top_k / experts)
    taken = [0] * experts
    for k in range(top_k):
        for t, chosen in enumerate(choices):
            kept[t][k] = taken[chosen[k]] < room
            taken[chosen[k]] += kept[t][k]
    return kept


def expert_oracle(x_D: Tensor, up_DH: Tensor, down_HD: Tensor, kind: Kind) -> Tensor:
    hidden = x_D @ up_DH
    if kind == "ffn":
        return (hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))) @ down_HD
    half = hidden.shape[0] // 2
    return (hidden[:half] * torch.sigmoid(hidden[:half]) * hidden[half:]) @ down_HD


def expert_weights(layer: MoELayer) -> dict[int, tuple[Tensor, Tensor]]:
    weights: dict[int, dict[str, Tensor]] = {}
    for group, role, stack in layer.bank.stacks():
        for place, expert in enumerate(group.ids):
            weights.setdefault(expert, {})[role] = stack[place]
    return {expert: (pair["up"], pair["down"]) for expert, pair in weights.items()}


def shares(previous: Sequence[int]) -> list[float]:
    """How often each expert was used in the previous step, 1 for its even share."""
    total = sum(previous)
    return [count / total * len(previous) if total else 1.0 for count in previous]


def of_sum_one(values: Sequence[Tensor]) -> list[Tensor]:
    total = torch.stack(list(values)).sum()
    return [value / total for value in values]
