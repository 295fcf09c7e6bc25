"""The slow, obvious form of the MoE layer: token by token, expert by expert, in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from experts.layer import MoELayer


def expert_weights(layer: MoELayer) -> dict[int, tuple[Tensor, Tensor]]:
    weights: dict[int, dict[str, Tensor]] = {}
    for group, role, stack in layer.bank.stacks():
        for place, expert in enumerate(group.ids):
            weights.setdefault(expert, {})[role] = stack[place]
    return {expert: (pair["up"], pair["down"]) for expert, pair in weights.items()}


def moe_oracle(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Output, balance loss, z-loss and counts of one forward pass."""
    experts = expert_weights(layer)
    previous = layer.load_E.double()
    total = float(previous.sum())
    share = [float(p) / total * len(previous) if total else 1.0 for p in previous]
    rows, balance, z = [], x_TD.new_zeros(()), x_TD.new_zeros(())
    counts = [0] * len(experts)
    for x_D in x_TD:
        logits = torch.stack([(layer.gate.weight_ED[e] * x_D).sum() for e in range(len(experts))])
        probabilities = logits.exp() / logits.exp().sum()
        balance = balance + sum(probabilities[e] * share[e] for e in range(len(experts)))
        z = z + logits.exp().sum().log() ** 2
        chosen = sorted(range(len(experts)), key=lambda e: -float(probabilities[e]))[: layer.gate.top_k]
        norm = sum(probabilities[e] for e in chosen) if layer.gate.top_k > 1 else 1.0
        out = torch.zeros_like(x_D)
        for e in chosen:
            counts[e] += 1
            up, down = experts[e]
            hidden = x_D @ up
            half = hidden.shape[0] // 2
            gated = hidden[:half] * torch.sigmoid(hidden[:half]) * hidden[half:]
            out = out + probabilities[e] / norm * (gated @ down)
        rows.append(out)
    return torch.stack(rows) if rows else x_TD, balance, z, counts
