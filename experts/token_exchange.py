"""A layer's tokens on their way to the hosts of their experts and back, in one part or in several.

A token travels once to each host that has experts for it, with their ids and weights; it comes back once from each, as the
weighted sum of what they made of it; the sums are added in the order of the hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from experts.context import MoEContext
from experts.dispatch import collect
from experts.exchange import Layout, Transfer, TransferPlan, receive, receive_back, send, send_back
from experts.types import Routing, RowMap


@dataclass
class ExchangeChunk:
    """Some of the tokens: those that leave this host, and in turn those that come here."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_SK: Tensor
    out: Transfer
    back: Transfer
    pairs: int
    """Rows for this host's experts among what arrives."""
    anchor: Tensor
    hosts: MoEContext
    _ticket: Tensor | None = None

    def set_out(self) -> None:
        if not self.hosts.repeating:
            self._ticket = send(self.x_TD, self.weights_TK, self.ids_SK, self.anchor, self.out)

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        def travelled() -> tuple[Tensor, Tensor, Tensor]:
            assert self._ticket is not None
            return receive(self._ticket, self.out, self.x_TD, self.weights_TK)

        return self.hosts.replayed(travelled)

    def set_out_back(self, made_GD: Tensor) -> None:
        if not self.hosts.repeating:
            self._ticket = send_back(made_GD, self.anchor, self.back)

    def back_home(self) -> Tensor:
        def travelled() -> Tensor:
            assert self._ticket is not None
            return receive_back(self._ticket, self.back)

        return collect(self.hosts.replayed(travelled), self.out.load.fan)


@dataclass
class TokenExchange:
    parts: list[ExchangeChunk] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        x_TD: Tensor,
        routing: Routing,
        host_E: Tensor,
        kept_TK: Tensor | None,
        hosts: MoEContext,
        layer: int = 0,
    ) -> TokenExchange:
        """Who goes where. All hosts must call it: they tell each other how many rows will come. ``layer`` is its number, which
        must be the same on all."""
        host_TK = host_E[routing.experts_TK]
        if hosts.step.dummy:
            host_TK = torch.full_like(host_TK, -1)
        elif kept_TK is not None:
            host_TK = torch.where(kept_TK, host_TK, -1)
        slices = _cut(len(x_TD), hosts.chunks)
        exchange, layout = hosts.exchange, Layout.of(x_TD, routing.weights_TK)
        fans = [_fan(host_TK[s], exchange.size) for s in slices]
        mine_NC = torch.stack([count_N for fan in fans for count_N in (fan.rows_N, fan.pairs_N)], dim=1)

        def told() -> tuple[list[list[int]], list[list[int]]]:
            received = exchange.counts(mine_NC, (layer, len(host_E), layout.size, len(slices)))
            return mine_NC.tolist(), received

        sent, received = hosts.replayed(told)
        anchor = x_TD.new_zeros((), requires_grad=torch.is_grad_enabled())
        crossing = cls()
        for number, (part, fan) in enumerate(zip(slices, fans, strict=True)):
            x_PD, weights_PK = (
                (x_TD, routing.weights_TK) if len(slices) == 1 else (x_TD[part], routing.weights_TK[part])
            )
            load = TransferPlan(
                fan.fan(sum(row[2 * number] for row in sent)),
                *(tuple(row[2 * number] for row in t) for t in (sent, received)),
            )
            ids_SK = fan.ids(routing.experts_TK[part], load)
            pairs = sum(row[2 * number + 1] for row in received)
            journeys = Transfer(exchange, load), Transfer(exchange, load)
            crossing.parts.append(ExchangeChunk(x_PD, weights_PK, ids_SK, *journeys, pairs, anchor, hosts))
        return crossing

    def set_out(self) -> None:
        for part in self.parts:
            part.set_out()

    def back_home(self) -> Tensor:
        made = [part.back_home() for part in self.parts]
        return made[0] if len(made) == 1 else torch.cat(made)


@dataclass(frozen=True)
class _Wanted:
    """Which hosts want which tokens."""

    host_TK: Tensor
    wanted_NT: Tensor
    rows_N: Tensor
    pairs_N: Tensor

    def fan(self, rows: int) -> RowMap:
        """A copy of a token for each host, sorted by host and then by token; the same again by token, -1 for none."""
        flat = self.wanted_NT.reshape(-1)
        tokens = self.wanted_NT.shape[1]
        place_NT = (flat.cumsum(0) - 1).view_as(self.wanted_NT)
        back_TN = torch.where(self.wanted_NT, place_NT, -1).t().contiguous()
        source_S = torch.nonzero_static(flat, size=rows).squeeze(1) % max(1, tokens)
        return RowMap(source_S, back_TN, full=False)

    def ids(self, experts_TK: Tensor, load: TransferPlan) -> Tensor:
        """The experts that want each row that leaves, -1 for those on other hosts."""
        source_S = load.fan.source_R
        hosts_S = torch.repeat_interleave(
            torch.arange(len(load.sends), device=source_S.device),
            torch.tensor(load.sends, device=source_S.device),
            output_size=len(source_S),
        )
        there_SK = self.host_TK.index_select(0, source_S) == hosts_S.unsqueeze(1)
        return torch.where(there_SK, experts_TK.index_select(0, source_S), -1).to(torch.int32)


def _fan(host_TK: Tensor, hosts: int) -> _Wanted:
    tokens = len(host_TK)
    chosen_TK = torch.where(host_TK < 0, hosts, host_TK)
    wanted_NT = torch.zeros(hosts + 1, tokens, dtype=torch.bool, device=host_TK.device)
    for chosen_T in chosen_TK.unbind(1):
        wanted_NT[chosen_T, torch.arange(tokens, device=host_TK.device)] = True
    pairs_N = torch.zeros(hosts + 1, dtype=torch.int64, device=host_TK.device)
    pairs_N = pairs_N.scatter_add_(0, chosen_TK.reshape(-1), torch.ones_like(chosen_TK.reshape(-1)))[:hosts]
    wanted_NT = wanted_NT[:hosts]
    return _Wanted(host_TK, wanted_NT, wanted_NT.sum(1), pairs_N)


def _cut(tokens: int, parts: int) -> Sequence[slice]:
    """As many parts on every host, however many tokens it has: all must meet as often."""
    bounds = [tokens * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def kept_choices(experts_TK: Tensor, experts: int, capacity: float, hosts: MoEContext) -> Tensor:
    """Which choices an expert has room for: ``capacity`` times its even share of the micro-batch, over all hosts. First choices
    go before second ones, and among them earlier tokens before later ones; hosts hold tokens in the order of their ranks."""
    tokens, top_k = experts_TK.shape
    flat_R = experts_TK.t().reshape(-1)
    counts_KE = torch.zeros(top_k, experts, dtype=torch.int64, device=flat_R.device)
    counts_KE = counts_KE.scatter_add_(1, experts_TK.t(), torch.ones_like(experts_TK.t()))
    if hosts.step.dummy:
        counts_KE = torch.zeros_like(counts_KE)
    exchange = hosts.exchange
    told = exchange.counts(counts_KE.reshape(1, -1).expand(exchange.size, -1).contiguous(), (experts, top_k))
    counts_NKE = counts_KE.new_tensor(told).view(exchange.size, top_k, experts)
    room = math.ceil(capacity * int(counts_NKE.sum()) / experts)
    whole_KE = counts_NKE.sum(0)
    before_KE = whole_KE.cumsum(0) - whole_KE + counts_NKE[: exchange.rank].sum(0)
    place_KT = torch.arange(tokens * top_k, device=flat_R.device).view(top_k, tokens)
    order_R = torch.argsort(
        flat_R + experts * (place_KT // max(1, tokens)).reshape(-1), stable=True
    )  # by choice, expert, token
    begins_KE = (counts_KE.reshape(-1).cumsum(0) - counts_KE.reshape(-1)).view_as(counts_KE)
    rank_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    ahead_KT = (
        rank_R.view(top_k, tokens) - begins_KE.gather(1, experts_TK.t()) + before_KE.gather(1, experts_TK.t())
    )
    return (ahead_KT < room).t()
