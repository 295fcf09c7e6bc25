"""Models of the built-in tasks: a residual MLP classifier and a decoder-only transformer, with MoE or dense
blocks.

Their forward returns the logits and the routings of the MoE layers; modules store nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.moe.bank import computing_dtype
from experts.moe.layer import MoELayer
from experts.types import Routing
from orchestrator.config.sections.model import ModelSettings, MoeSettings
from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss
from orchestrator.tasks.token_loss import TokenLoss, has_large_logits, token_loss

_MAX_ACCURACY_CLASSES = 64  # over a larger vocabulary, accuracy in training costs a pass over all logits
_BALANCE_LOSS = 0.01


@dataclass(frozen=True)
class Shape:
    """Sizes of a built-in model, all decided."""

    width: int
    layers: int
    expert_sizes: tuple[int, ...]
    top_k: int
    moe: MoeSettings
    """Further settings of the MoE layers."""

    @classmethod
    def of(
        cls,
        model: ModelSettings,
        moe: MoeSettings,
        *,
        width: int,
        layers: int,
        experts: int,
        hidden: int,
        top_k: int,
    ) -> Shape:
        """Return the settings, with the task's defaults for those left open.

        A single hidden size is the size of every expert.
        """
        experts = experts if moe.experts is None else moe.experts
        sizes = moe.expert_hidden_size or (hidden,)
        if moe.experts is None and len(sizes) > 1:
            experts = len(sizes)
        if len(sizes) not in (1, experts):
            raise UserError(
                f"--expert-hidden-size has {len(sizes)} sizes for {experts} experts; "
                "give one size, or one per expert"
            )
        if moe.top_k is not None and moe.top_k > experts > 0:
            raise UserError(
                f"--top-k {moe.top_k} needs at least as many experts; there are {experts}: "
                "lower it or raise --experts"
            )
        return cls(
            width=model.width or width,
            layers=model.layers or layers,
            expert_sizes=sizes * experts if len(sizes) == 1 else sizes,
            top_k=moe.top_k or min(top_k, max(1, experts)),
            moe=moe,
        )


class FeedForward(nn.Module):
    """The dense block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(F.gelu(self.up(x))), None


def build_feed_forward(shape: Shape) -> MoELayer | FeedForward:
    if not shape.expert_sizes:
        return FeedForward(shape.width, 4 * shape.width)
    moe = shape.moe
    return MoELayer(
        shape.width,
        shape.expert_sizes,
        shape.top_k,
        kind=moe.expert_kind,
        scores=moe.gate_scores,
        normalise=moe.normalise_weights,
        bias_rate=moe.balance_bias,
        jitter=moe.gate_jitter,
        capacity=moe.capacity_factor,
        shared=moe.shared_expert_size,
    )


class ResidualBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.ffn = build_feed_forward(shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        y, routing = self.ffn(self.norm(x))
        return x + y, routing


class Classifier(nn.Module):
    """Features to classes: a linear stem, residual blocks, a linear head."""

    def __init__(self, features: int, classes: int, shape: Shape) -> None:
        super().__init__()
        self.stem = nn.Linear(features, shape.width)
        self.blocks = nn.ModuleList(ResidualBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Routing]]:
        x, routings = run_blocks(self.blocks, self.stem(x))
        return self.head(self.norm(x)), routings


class Attention(nn.Module):
    """Causal self-attention with heads of 64 or 32, or a single one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = next(heads for heads in (width // 64, width // 32, 1) if heads and width % heads == 0)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width)
        self.block = ResidualBlock(shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        return self.block(x + self.attention(self.attention_norm(x)))


class Decoder(nn.Module):
    """Tokens to next-token logits. The output layer shares the embedding's weights."""

    def __init__(self, vocabulary: int, context: int, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.position = nn.Embedding(context, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | TokenLoss, list[Routing]]:
        """Return the logits; with targets, and where logits are large, the loss in their place."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x, routings = run_blocks(self.blocks, self.embedding(tokens) + self.position(positions))
        hidden = self.norm(x)
        output = self.embedding.weight
        # Over few classes every batch, a short one too, counts the accuracy in training, from all logits.
        has_accuracy = len(output) <= _MAX_ACCURACY_CLASSES
        # In fp16 gradients are scaled before they are rounded, and chunks would round them first.
        in_chunks = not has_accuracy and computing_dtype(hidden) != torch.float16
        if targets is not None and in_chunks and has_large_logits(tokens.shape[1], len(output)):
            return token_loss(hidden.flatten(0, 1), output, targets.flatten()), routings
        return F.linear(hidden, output), routings


def run_blocks(blocks: nn.ModuleList, x: Tensor) -> tuple[Tensor, list[Routing]]:
    """Run blocks in order; return the output and the routings of those with MoE layers."""
    routings: list[Routing] = []
    for block in blocks:
        x, routing = block(x)
        if routing is not None:
            routings.append(routing)
    return x, routings


def classification_loss(
    model: nn.Module,
    output: Tensor | TokenLoss,
    targets: Tensor,
    routings: Sequence[Routing],
    moe: MoeSettings,
) -> Loss:
    """Return cross-entropy over the last dimension of logits and, in training, the gates' own losses.

    Each is a sum over the targets. ``output`` may be the cross-entropy already.
    """
    count = targets.numel()
    loads = tuple(routing.counts_E for routing in routings)
    cross_entropy, num_correct = _loss_of_logits(model, output, targets)
    metrics: dict[str, Tensor] = {}
    if num_correct is not None:
        metrics["accuracy"] = num_correct
    if not model.training or not routings:
        return Loss(cross_entropy, count, metrics, loads)
    zero = torch.zeros_like(cross_entropy)
    balance = sum((routing.balance for routing in routings), start=zero)
    weight = _BALANCE_LOSS if moe.balance_loss is None else moe.balance_loss
    balance = balance * (weight / len(routings))
    z = sum((routing.z for routing in routings), start=zero)
    z = z * (moe.z_loss / len(routings))
    metrics["cross_entropy"] = cross_entropy.detach()
    metrics["balance_loss"] = balance.detach()
    return Loss(cross_entropy + balance + z, count, metrics, loads)


def _loss_of_logits(model: nn.Module, output: Tensor | TokenLoss, targets: Tensor) -> TokenLoss:
    if isinstance(output, TokenLoss):
        return output
    flat = output.flatten(0, -2)
    cross_entropy = F.cross_entropy(flat, targets.flatten(), reduction="sum")
    if model.training and flat.shape[-1] > _MAX_ACCURACY_CLASSES:
        return TokenLoss(cross_entropy, None)
    return TokenLoss(cross_entropy, (flat.argmax(-1) == targets.flatten()).sum())
