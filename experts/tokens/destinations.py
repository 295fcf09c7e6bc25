"""The hosts that tokens are sent to, and the rows that this makes.

No table has a column per host, so that memory does not grow with their number. See ``types`` for
the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experts.tokens.dispatch import SlotOrder, key_dtype
from experts.tokens.transfer import TransferPlan


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
        token_S = plan.row_map.token_R
        host_S = self.order.key_R[: len(token_S)]
        on_host_SK = self.host_TK.index_select(0, token_S) == host_S.unsqueeze(1)
        experts_SK = experts_TK.index_select(0, token_S)
        return torch.where(on_host_SK, experts_SK, -1).to(torch.int32)


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
