"""The slow, obvious form of the MoE layer with all its options: token by token, expert by expert,
in plain Python.

T counts tokens, D is their width, H the hidden size, E counts experts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from experts.moe.gate import Gate
from experts.moe.layer import MoELayer
from experts.types import Kind


def moe_oracle(
    layer: MoELayer, x_TD: Tensor, noise_TD: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Output, balance loss, z loss and counts of one forward pass.

    ``noise_TD`` multiplies the gate's input."""
    experts = expert_weights(layer)
    share = load_shares(layer.load_E.tolist())
    balance = x_TD.new_zeros(())
    z = x_TD.new_zeros(())
    choices: list[list[int]] = []
    weights: list[list[Tensor]] = []
    for t, x_D in enumerate(x_TD):
        input_D = x_D if noise_TD is None else x_D * noise_TD[t]
        logits, scores = gate_scores(layer.gate, input_D)
        probabilities = normalise(scores)
        balance = balance + sum(probabilities[e] * share[e] for e in range(len(experts)))
        z = z + torch.stack([logit.exp() for logit in logits]).sum().log() ** 2
        chosen = choose(layer.gate, scores)
        choices.append(chosen)
        chosen_scores = [scores[e] for e in chosen]
        normalised = layer.gate.normalise and layer.gate.top_k > 1
        weights.append(normalise(chosen_scores) if normalised else chosen_scores)
    kept = kept_oracle(choices, len(experts), layer.capacity)
    outputs: list[Tensor] = []
    for t, x_D in enumerate(x_TD):
        output_D = torch.zeros_like(x_D)
        for k, e in enumerate(choices[t]):
            if kept[t][k]:
                output_D = output_D + weights[t][k] * expert_oracle(x_D, *experts[e], layer.bank.kind)
        if layer.shared is not None:
            shared = layer.shared
            output_D = output_D + expert_oracle(
                x_D, shared.up.weight.t(), shared.down.weight.t(), shared.kind
            )
        outputs.append(output_D)
    counts = [sum(chosen.count(e) for chosen in choices) for e in range(len(experts))]
    return torch.stack(outputs) if outputs else x_TD, balance, z, counts


def gate_scores(gate: Gate, input_D: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and scores of all experts for one token."""
    logits = [(weight_D * input_D).sum() for weight_D in gate.weight_ED]
    if gate.scores == "sigmoid":
        return logits, [1 / (1 + (-logit).exp()) for logit in logits]
    return logits, normalise([logit.exp() for logit in logits])


def choose(gate: Gate, scores: Sequence[Tensor]) -> list[int]:
    """The experts with the highest biased scores, in descending order."""
    bias = gate.bias_E.tolist() if gate.bias_rate else [0.0] * len(scores)
    order = sorted(range(len(scores)), key=lambda e: -(scores[e].item() + bias[e]))
    return order[: gate.top_k]


def kept_oracle(
    choices: Sequence[Sequence[int]],
    experts: int,
    capacity: float | None,
) -> list[list[bool]]:
    """Which choices are kept, where an expert takes at most ``capacity`` times its even share.

    All first choices come in the order of tokens, then all second ones, and so on."""
    kept = [[True] * len(chosen) for chosen in choices]
    if capacity is None or not choices:
        return kept
    top_k = len(choices[0])
    limit = math.ceil(capacity * len(choices) * top_k / experts)
    taken = [0] * experts
    for k in range(top_k):
        for t, chosen in enumerate(choices):
            kept[t][k] = taken[chosen[k]] < limit
            taken[chosen[k]] += kept[t][k]
    return kept


def expert_oracle(x_D: Tensor, up_DH: Tensor, down_HD: Tensor, kind: Kind) -> Tensor:
    hidden_H = x_D @ up_DH
    if kind == "ffn":
        return (hidden_H * 0.5 * (1 + torch.erf(hidden_H / math.sqrt(2)))) @ down_HD
    half = hidden_H.shape[0] // 2
    gate_H, value_H = hidden_H[:half], hidden_H[half:]
    return (gate_H * torch.sigmoid(gate_H) * value_H) @ down_HD


def expert_weights(layer: MoELayer) -> dict[int, tuple[Tensor, Tensor]]:
    """The two matrices of each expert, by global id."""
    weights: dict[int, dict[str, Tensor]] = {}
    for group, role, stack in layer.bank.stacks():
        for index, expert in enumerate(group.rows):
            weights.setdefault(expert, {})[role] = stack[index]
    return {expert: (roles["up"], roles["down"]) for expert, roles in weights.items()}


def load_shares(previous: Sequence[int]) -> list[float]:
    """The load of each expert in the previous step, as a multiple of its even share."""
    total = sum(previous)
    return [count / total * len(previous) if total else 1.0 for count in previous]


def normalise(values: Sequence[Tensor]) -> list[Tensor]:
    """The values divided by their sum."""
    total = torch.stack(list(values)).sum()
    return [value / total for value in values]
