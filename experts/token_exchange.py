"""The tokens of a layer on their way to the hosts of their experts and back.

They are sent in one chunk or in several. A token is sent once to each host that has experts for it,
with their ids and weights. It comes back once from each such host, as the weighted sum of the
experts' outputs; these sums are added in the order of hosts. See ``types`` for the letters of
shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from experts.context import MoEContext
from experts.dispatch import sum_rows
from experts.exchange import Exchange
from experts.transfer import Layout, Transfer, TransferPlan, receive, receive_back, send, send_back
from experts.types import Routing, RowMap


@dataclass
class ExchangeChunk:
    """A chunk of the tokens that this host sends, and of those that it receives in turn."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_SK: Tensor
    """Experts that each sent row is for, -1 for experts of other hosts."""
    outbound: Transfer
    """Tokens to the hosts of their experts."""
    inbound: Transfer
    """Outputs back to the hosts of the tokens."""
    num_rows: int
    """Rows for this host's experts among the received tokens: a token counts once for each of
    them."""
    anchor: Tensor
    context: MoEContext
    _ticket: Tensor | None = None

    def send(self) -> None:
        if not self.context.replaying:
            self._ticket = send(self.x_TD, self.weights_TK, self.ids_SK, self.anchor, self.outbound)

    def receive(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, weights and expert ids of the tokens that other hosts sent."""

        def received() -> tuple[Tensor, Tensor, Tensor]:
            assert self._ticket is not None, "receive before send"
            return receive(self._ticket, self.outbound, self.x_TD, self.weights_TK)

        return self.context.replayed(received)

    def send_back(self, output_GD: Tensor) -> None:
        if not self.context.replaying:
            self._ticket = send_back(output_GD, self.anchor, self.inbound)

    def receive_back(self) -> Tensor:
        """Return the outputs for this host's tokens."""

        def received() -> Tensor:
            assert self._ticket is not None, "receive_back before send_back"
            return receive_back(self._ticket, self.inbound)

        rows_SD = self.context.replayed(received)
        return sum_rows(rows_SD, self.outbound.plan.row_map)


@dataclass
class TokenExchange:
    """All chunks of a layer's tokens."""

    chunks: list[ExchangeChunk]

    @classmethod
    def plan(
        cls,
        x_TD: Tensor,
        routing: Routing,
        host_E: Tensor,
        kept_TK: Tensor | None,
        context: MoEContext,
        layer_id: int = 0,
    ) -> TokenExchange:
        """Decide the rows to send, and exchange their counts with all hosts.

        All hosts must call it. ``kept_TK`` is False for choices that are dropped. ``layer_id`` must
        be the same on all hosts."""
        exchange = context.exchange
        host_TK = host_E[routing.experts_TK]
        if context.step.dummy:
            host_TK = torch.full_like(host_TK, -1)
        elif kept_TK is not None:
            host_TK = torch.where(kept_TK, host_TK, -1)
        slices = _chunk_slices(len(x_TD), context.num_chunks)
        destinations = [_Destinations.of(host_TK[part], exchange.size) for part in slices]
        layout = Layout.of(x_TD, routing.weights_TK)
        header = (layer_id, len(host_E), layout.size, len(slices))
        sent, received = context.replayed(lambda: _exchange_counts(exchange, destinations, header))
        anchor = x_TD.new_zeros((), requires_grad=torch.is_grad_enabled())
        chunks: list[ExchangeChunk] = []
        is_single = len(slices) == 1
        for number, (part, destination) in enumerate(zip(slices, destinations, strict=True)):
            send_counts = _column(sent, 2 * number)
            receive_counts = _column(received, 2 * number)
            plan = destination.transfer_plan(send_counts, receive_counts)
            chunk = ExchangeChunk(
                # Slicing a single chunk would add nodes to the autograd graph.
                x_TD=x_TD if is_single else x_TD[part],
                weights_TK=routing.weights_TK if is_single else routing.weights_TK[part],
                ids_SK=destination.expert_ids(routing.experts_TK[part], plan),
                outbound=Transfer(exchange, plan),
                inbound=Transfer(exchange, plan),
                num_rows=sum(_column(received, 2 * number + 1)),
                anchor=anchor,
                context=context,
            )
            chunks.append(chunk)
        return cls(chunks)

    def send(self) -> None:
        for chunk in self.chunks:
            chunk.send()

    def receive_back(self) -> Tensor:
        outputs = [chunk.receive_back() for chunk in self.chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True)
class _Destinations:
    """The hosts that a chunk's tokens are sent to."""

    host_TK: Tensor
    """Host of each choice, -1 for a dropped one."""
    sent_NT: Tensor
    """Whether a token is sent to a host."""
    rows_N: Tensor
    """Rows sent to each host."""
    expert_rows_N: Tensor
    """Rows for the experts of each host: a token counts once for each of its experts there."""

    @classmethod
    def of(cls, host_TK: Tensor, num_hosts: int) -> _Destinations:
        device = host_TK.device
        tokens = len(host_TK)
        # Dropped choices go to a host of their own after the last, which is cut off again: no
        # data-dependent shapes.
        chosen_TK = torch.where(host_TK < 0, num_hosts, host_TK)
        sent_NT = torch.zeros(num_hosts + 1, tokens, dtype=torch.bool, device=device)
        # Choice by choice: two choices of a token may be on one host, which still gets one row.
        for chosen_T in chosen_TK.unbind(1):
            sent_NT[chosen_T, torch.arange(tokens, device=device)] = True
        chosen_R = chosen_TK.reshape(-1)
        expert_rows_N = torch.zeros(num_hosts + 1, dtype=torch.int64, device=device)
        expert_rows_N = expert_rows_N.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))[:num_hosts]
        sent_NT = sent_NT[:num_hosts]
        return cls(host_TK, sent_NT, sent_NT.sum(1), expert_rows_N)

    def transfer_plan(
        self,
        send_counts: tuple[int, ...],
        receive_counts: tuple[int, ...],
    ) -> TransferPlan:
        """Return the rows to send, sorted by host and then by token."""
        # nonzero_static: the counts say how many there are, so that the host need not wait for the
        # device again.
        sent_flat = self.sent_NT.reshape(-1)
        index_S = torch.nonzero_static(sent_flat, size=sum(send_counts)).squeeze(1)
        tokens = self.sent_NT.shape[1]
        row_NT = (sent_flat.cumsum(0) - 1).view_as(self.sent_NT)
        row_TN = torch.where(self.sent_NT, row_NT, -1).t().contiguous()
        row_map = RowMap(index_S % max(1, tokens), row_TN, complete=False)
        return TransferPlan(row_map, send_counts, receive_counts)

    def expert_ids(self, experts_TK: Tensor, plan: TransferPlan) -> Tensor:
        """Return the experts that each sent row is for, -1 for experts of other hosts."""
        token_S = plan.row_map.token_R
        host_S = torch.repeat_interleave(
            torch.arange(len(plan.send_counts), device=token_S.device),
            torch.tensor(plan.send_counts, device=token_S.device),
            output_size=len(token_S),
        )
        on_host_SK = self.host_TK.index_select(0, token_S) == host_S.unsqueeze(1)
        experts_SK = experts_TK.index_select(0, token_S)
        return torch.where(on_host_SK, experts_SK, -1).to(torch.int32)


def _exchange_counts(
    exchange: Exchange,
    destinations: Sequence[_Destinations],
    header: Sequence[int],
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tables of counts that this host sent and received.

    A table has a row per host and two columns per chunk: rows, and rows for experts."""
    columns = [counts_N for each in destinations for counts_N in (each.rows_N, each.expert_rows_N)]
    counts_NC = torch.stack(columns, dim=1)
    received = exchange.all_to_all_counts(counts_NC, header)
    return counts_NC.tolist(), received


def _column(table: Sequence[Sequence[int]], index: int) -> tuple[int, ...]:
    return tuple(row[index] for row in table)


def _chunk_slices(tokens: int, num_chunks: int) -> Sequence[slice]:
    """Cut tokens into chunks, as many on every host.

    Each chunk is a collective, also where a host has no tokens for it."""
    bounds = [tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


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
    exchange = context.exchange
    top_k = experts_TK.shape[1]
    experts_KT = experts_TK.t()
    counts_KE = torch.zeros(top_k, num_experts, dtype=torch.int64, device=experts_TK.device)
    counts_KE = counts_KE.scatter_add_(1, experts_KT, torch.ones_like(experts_KT))
    if context.step.dummy:
        counts_KE = torch.zeros_like(counts_KE)
    table_NC = counts_KE.reshape(1, -1).expand(exchange.size, -1).contiguous()
    received = exchange.all_to_all_counts(table_NC, (num_experts, top_k))
    counts_NKE = counts_KE.new_tensor(received).view(exchange.size, top_k, num_experts)
    limit = math.ceil(capacity * int(counts_NKE.sum()) / num_experts)
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
