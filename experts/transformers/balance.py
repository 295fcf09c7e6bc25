"""Balance of the experts of ``transformers``: the auxiliary loss of a whole batch, and biases of routers.

The loss of ``transformers`` is E · Σ f · p, the product of two means over the tokens of a pass, pooled over
the layers: the choices f and the probabilities p of each expert. Computed per micro-batch or per host, it
is another loss, and its scale depends on their number. With f of the whole batch it is a sum over tokens:
the shares of all passes and hosts add up to the loss of one process.

Routers of some families add a bias to their scores: for the choice of experts, not for weights. DeepSeek-V3,
GLM-4 MoE and others have it in the router, MiniMax-M2 in the block around it. See ``experts.types`` for the
letters of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.context import MoEContext
from experts.tokens.exchange import Exchange, LocalExchange
from experts.transformers.hosted import HostedExperts, RouterBias

_BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
RouterOutputs = tuple[Sequence[Tensor] | None, Tensor | None]
"""The router logits of a pass, by layer, and its attention mask; None for a batch without padding."""


@dataclass(frozen=True)
class BalanceCounts:
    """Choices of each expert, and rows that were routed, over all layers."""

    choices_E: Tensor
    rows: Tensor

    def plus(self, other: BalanceCounts) -> BalanceCounts:
        return BalanceCounts(self.choices_E + other.choices_E, self.rows + other.rows)


def balance_loss(
    model: nn.Module,
    router_logits: Sequence[Tensor] | None,
    attention_mask: Tensor | None = None,
    counts: BalanceCounts | None = None,
) -> Tensor:
    """Return this pass's share of the auxiliary loss of the whole batch.

    ``router_logits`` are those of the model's outputs. Multiply it by ``config.router_aux_loss_coef``
    and add it to the mean loss, in place of ``aux_loss``. ``counts`` are those of the step
    (``step_counts``). Without them, this pass is the step's only one on each host: all hosts must
    call it."""
    router_logits = _checked(router_logits)
    if counts is None:
        context = _context(model)
        # Of a micro-batch that one host computes whole, the others have no tokens.
        exchange = LocalExchange() if context.by_choice else context.exchange
        counts = _over_hosts(pass_counts(model, router_logits, attention_mask), exchange)
    share_E = (counts.choices_E / counts.rows.clamp(min=1)).to(router_logits[0].device)
    total = _sum_probabilities(router_logits[0], attention_mask) @ share_E
    for logits_TE in router_logits[1:]:
        total = total + _sum_probabilities(logits_TE, attention_mask) @ share_E
    return total * len(share_E) / counts.rows.clamp(min=1)


@torch.no_grad()
def step_counts(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], RouterOutputs]
) -> BalanceCounts:
    """Return the counts of a step with several micro-batches, by a forward pass over each.

    ``forward`` returns the router logits and the attention mask of a micro-batch. All hosts must call
    it, with as many micro-batches. It costs a third of a step: the choices of later micro-batches
    weigh the gradients of the first."""
    passes = [pass_counts(model, *forward(batch)) for batch in batches]
    return _over_hosts(reduce(BalanceCounts.plus, passes), _context(model).exchange)


def _checked(router_logits: Sequence[Tensor] | None) -> Sequence[Tensor]:
    if not router_logits:
        raise ValueError(
            "the model's outputs have no router logits, which the auxiliary loss is computed from: call it "
            "with output_router_logits=True. Granite-MoE of transformers 5.17 has none even then"
        )
    return router_logits


def _context(model: nn.Module) -> MoEContext:
    return moe_layers(model)[0][1].context


def pass_counts(
    model: nn.Module, router_logits: Sequence[Tensor] | None, attention_mask: Tensor | None
) -> BalanceCounts:
    """Return the choices of one pass on this host. A dummy pass has none."""
    router_logits = _checked(router_logits)
    top_k = moe_layers(model)[0][1].top_k
    num_experts = router_logits[0].shape[-1]
    choices_E = torch.zeros(num_experts, dtype=torch.int64, device=router_logits[0].device)
    rows = torch.zeros((), dtype=torch.int64, device=choices_E.device)
    for logits_TE in router_logits:
        # ``transformers`` counts the choices of a softmax, even where the router scores by a sigmoid.
        chosen_TK = logits_TE.detach().softmax(-1).topk(top_k, dim=-1).indices
        counted_T = torch.ones_like(chosen_TK[:, 0])
        if attention_mask is not None:
            counted_T = attention_mask.reshape(-1).to(chosen_TK)
        if _context(model).step.dummy:
            counted_T = torch.zeros_like(counted_T)
        choices_E.scatter_add_(0, chosen_TK.flatten(), counted_T.repeat_interleave(top_k))
        rows = rows + counted_T.sum()
    return BalanceCounts(choices_E, rows)


def _over_hosts(counts: BalanceCounts, exchange: Exchange) -> BalanceCounts:
    if exchange.size == 1:
        return BalanceCounts(counts.choices_E.double(), counts.rows.double())
    vector = torch.cat([counts.choices_E, counts.rows.reshape(1)])
    table_NC = vector.reshape(1, -1).expand(exchange.size, -1).contiguous()
    total = exchange.all_to_all_counts(table_NC, (len(counts.choices_E),)).sum(0).to(vector.device)
    return BalanceCounts(total[:-1].double(), total[-1].double())


def _sum_probabilities(logits_TE: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the sum over tokens of each expert's probability, in fp64."""
    probabilities_TE = logits_TE.softmax(-1).double()
    if attention_mask is not None:
        probabilities_TE = probabilities_TE * attention_mask.reshape(-1, 1).to(probabilities_TE)
    return probabilities_TE.sum(0)


def has_router_biases(model: nn.Module) -> bool:
    """Return whether ``use_balance_bias`` takes a model: each of its routers has a bias."""
    layers = _hosted_layers(model)
    return bool(layers) and all(_find_bias(model, name, layer, 0.0) for name, layer in layers)


def use_balance_bias(model: nn.Module, rate: float) -> None:
    """Let ``experts.balance.update_balance`` move the routers' biases by ``rate`` in each step.

    Call it after ``use``. A model with a router that has no such bias is refused."""
    layers = _hosted_layers(model)
    biases = [_find_bias(model, name, layer, rate) for name, layer in layers]
    without = [name for (name, _), bias in zip(layers, biases, strict=True) if bias is None]
    if without or not layers:
        where = without[0].removesuffix(".hosted") if without else "it has no layer of our experts"
        raise ValueError(
            f"{type(model).__name__} has no routing bias that could balance its experts ({where}). Families "
            "such as DeepSeek-V3, GLM-4 MoE and MiniMax-M2 have one; others balance by an auxiliary loss"
        )
    for (_, layer), bias in zip(layers, biases, strict=True):
        layer.router_bias = bias


def _hosted_layers(model: nn.Module) -> list[tuple[str, HostedExperts]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, HostedExperts)]


def _find_bias(model: nn.Module, name: str, layer: HostedExperts, rate: float) -> RouterBias | None:
    """Return the bias in the block of a layer: the module around ``experts.hosted``."""
    block_name = name.rpartition(".")[0].rpartition(".")[0]
    block: Any = model.get_submodule(block_name)
    for owner in block.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            if key in _BIAS_NAMES and buffer.shape == layer.load_E.shape:
                return RouterBias(owner, key, rate)
    return None
