"""The capacity of experts: choices beyond it are dropped. See ``types`` for the letters of shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experts.moe.context import MoEContext
from experts.tokens.exchange import LocalExchange


def capacity_mask(
    experts_TK: Tensor,
    num_experts: int,
    capacity: float,
    context: MoEContext,
) -> Tensor:
    """Return which choices are kept: True where the expert has capacity left.

    The capacity of an expert is ``capacity`` times its even share of the micro-batch over all
    hosts. First choices are kept before second ones, and among equal choices earlier tokens before
    later ones; hosts hold tokens in the order of their ranks. All hosts must call this."""
    # Of a micro-batch that one host computes whole, the others have no tokens.
    exchange = LocalExchange() if context.by_choice else context.exchange
    top_k = experts_TK.shape[1]
    experts_KT = experts_TK.t()
    counts_KE = torch.zeros(top_k, num_experts, dtype=torch.int64, device=experts_TK.device)
    counts_KE = counts_KE.scatter_add_(1, experts_KT, torch.ones_like(experts_KT))
    if context.step.dummy:
        counts_KE = torch.zeros_like(counts_KE)
    table_NC = counts_KE.reshape(1, -1).expand(exchange.size, -1).contiguous()
    received_NC = exchange.all_to_all_counts(table_NC, (num_experts, top_k))
    limit = math.ceil(capacity * int(received_NC.sum()) / num_experts)
    counts_NKE = received_NC.to(counts_KE.device).view(exchange.size, top_k, num_experts)
    total_KE = counts_NKE.sum(0)
    # Choices of other tokens that come first: earlier choices of all hosts, and equal choices of
    # lower ranks.
    before_KE = total_KE.cumsum(0) - total_KE + counts_NKE[: exchange.rank].sum(0)
    rank_KT = _rank_within_expert(experts_KT, counts_KE) + before_KE.gather(1, experts_KT)
    return (rank_KT < limit).t()


def _rank_within_expert(experts_KT: Tensor, counts_KE: Tensor) -> Tensor:
    """Return how many earlier tokens of this host have the same k-th choice."""
    top_k, tokens = experts_KT.shape
    num_experts = counts_KE.shape[1]
    device = experts_KT.device
    index_R = torch.arange(top_k * tokens, device=device)
    choice_R = index_R // max(1, tokens)
    # Sorted by choice, then expert, then token: the position within its run is the rank.
    order_R = torch.argsort(experts_KT.reshape(-1) + num_experts * choice_R, stable=True)
    position_R = torch.empty_like(order_R).scatter_(0, order_R, index_R)
    counts_R = counts_KE.reshape(-1)
    begin_KE = (counts_R.cumsum(0) - counts_R).view_as(counts_KE)
    return position_R.view(top_k, tokens) - begin_KE.gather(1, experts_KT)
