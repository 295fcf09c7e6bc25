"""The hosts that tokens are sent to, and the rows that this makes.

No table has a column per host, so that memory does not grow with their number. See ``types`` for
the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.tokens.bounds import RowBound
from experts.tokens.dispatch import SlotOrder, key_dtype
from experts.tokens.transfer import TransferPlan
from experts.types import RowMap


@dataclass(frozen=True)
class Destinations:
    """The hosts that a chunk's tokens are sent to."""

    host_TK: Tensor
    """Host of each choice, -1 for a dropped one."""
    order: SlotOrder
    """Rows sorted by host and then by token. A token has a row for each of its hosts."""
    expert_rows_N: Tensor
    """Rows for the experts of each host: a token counts once for each of its experts there."""

    @classmethod
    def of(cls, host_TK: Tensor, num_hosts: int) -> Destinations:
        # Dropped choices go to a host of their own after the last, which is cut off again: no
        # data-dependent shapes.
        chosen_TK = torch.where(host_TK < 0, num_hosts, host_TK)
        chosen_R = chosen_TK.reshape(-1)
        expert_rows_N = torch.zeros(num_hosts + 1, dtype=torch.int64, device=host_TK.device)
        expert_rows_N = expert_rows_N.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))[:num_hosts]
        order = SlotOrder.of(_distinct_hosts(chosen_TK, num_hosts), num_hosts)
        return cls(host_TK, order, expert_rows_N)

    @property
    def rows_N(self) -> Tensor:
        """Rows sent to each host."""
        return self.order.counts_L()

    def transfer_plan(
        self,
        send_counts: tuple[int, ...],
        receive_counts: tuple[int, ...],
    ) -> TransferPlan:
        # The counts say how many rows there are, so that the host need not wait for the device
        # again.
        return TransferPlan(self.order.row_map(sum(send_counts)), send_counts, receive_counts)

    def expert_ids(self, experts_TK: Tensor, plan: TransferPlan) -> Tensor:
        """Return the experts that each sent row is for, -1 for experts of other hosts."""
        host_S = self.order.key_R[: len(plan.row_map.token_R)]
        return self._ids_on_hosts(experts_TK, plan.row_map.token_R, host_S)

    def _ids_on_hosts(self, experts_TK: Tensor, token_S: Tensor, host_S: Tensor) -> Tensor:
        on_host_SK = self.host_TK.index_select(0, token_S) == host_S.unsqueeze(1)
        experts_SK = experts_TK.index_select(0, token_S)
        return torch.where(on_host_SK, experts_SK, -1).to(torch.int32)

    def bounded_plan(self, experts_TK: Tensor, bound: RowBound) -> tuple[TransferPlan, Tensor]:
        """Return the plan of a message of ``bound.block`` rows to each host, and the experts of its rows.

        Rows beyond the bound are left out. Padding copies the first token and is for no expert."""
        num_hosts = len(self.expert_rows_N)
        num_places = num_hosts * bound.block
        index_S = self.order.index_R
        host_S = self.order.key_R.long()
        ends_N = self.order.ends_L
        # P are the places of the message. Rows of absent choices have the key of a host after the last; they,
        # and rows beyond the bound, go to a place after the last, which is cut off.
        begin_S = F.pad(ends_N, (1, 0)).index_select(0, host_S)
        number_S = torch.arange(len(host_S), device=host_S.device) - begin_S
        is_sent_S = (host_S < num_hosts) & (number_S < bound.rows)
        place_S = torch.where(is_sent_S, host_S * bound.block + number_S, num_places)
        choice_P = torch.full((num_places + 1,), -1, device=host_S.device).scatter_(0, place_S, index_S)
        choice_P = choice_P[:num_places]
        token_P = choice_P.clamp(min=0) // self.order.top_k
        row_S = torch.where(is_sent_S, place_S, -1)
        row_TK = torch.empty_like(index_S).scatter_(0, index_S, row_S).view(-1, self.order.top_k)
        place_P = torch.arange(num_places, device=host_S.device)
        host_P = torch.where(choice_P >= 0, place_P // bound.block, -2)  # -2: no choice has this host
        plan = TransferPlan(RowMap(token_P, row_TK, complete=False), (), ())
        return plan, self._ids_on_hosts(experts_TK, token_P, host_P)


def _distinct_hosts(chosen_TK: Tensor, num_hosts: int) -> Tensor:
    """Return each host of a token once, in ascending order, and ``num_hosts`` for the rest.

    A token has at most K hosts: no table has a column per host."""
    top_k = chosen_TK.shape[1]
    hosts_TK = chosen_TK.to(key_dtype(num_hosts)).sort(dim=1).values
    repeated_TK = hosts_TK[:, 1:] == hosts_TK[:, :-1]
    hosts_TK[:, 1:].masked_fill_(repeated_TK, num_hosts)
    if top_k <= num_hosts:
        return hosts_TK
    return hosts_TK.sort(dim=1).values[:, :num_hosts]
