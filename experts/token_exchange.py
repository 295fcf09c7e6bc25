"""The tokens of a layer on their way to the hosts of their experts and back.

They are sent in one chunk or in several. A token is sent once to each host that has experts for it,
with their ids and weights. It comes back once from each such host, as the weighted sum of the
experts' outputs; these sums are added in the order of hosts. See ``types`` for the letters of
shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from experts.context import MoEContext
from experts.tokens.destinations import Destinations
from experts.tokens.dispatch import sum_rows
from experts.tokens.transfer import Layout, Transfer, receive, receive_back, send, send_back
from experts.types import Choices


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
        choices: Choices,
        host_TK: Tensor,
        context: MoEContext,
        header: tuple[int, ...] = (),
    ) -> TokenExchange:
        """Decide the rows to send, and exchange their counts with all hosts.

        All hosts must call it. ``host_TK`` is the host of each choice, -1 for one that is dropped.
        ``header`` describes the layer; it must be the same on all hosts."""
        exchange = context.exchange
        if context.step.dummy:
            host_TK = torch.full_like(host_TK, -1)
        slices = _chunk_slices(len(x_TD), context.num_chunks)
        destinations = [Destinations.of(host_TK[part], exchange.size) for part in slices]
        layout = Layout.of(x_TD, choices.weights_TK)
        header = (*header, layout.size, len(slices))
        top_k = choices.experts_TK.shape[1]
        sent, received = context.replayed(lambda: _exchange_counts(context, destinations, header, top_k))
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
                weights_TK=choices.weights_TK if is_single else choices.weights_TK[part],
                ids_SK=destination.expert_ids(choices.experts_TK[part], plan),
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


def _exchange_counts(
    context: MoEContext,
    destinations: Sequence[Destinations],
    header: Sequence[int],
    top_k: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tables of counts that this host sent and received.

    A table has a row per host and two columns per chunk: rows, and rows for experts."""
    columns = [counts_N for each in destinations for counts_N in (each.rows_N, each.expert_rows_N)]
    counts_NC = torch.stack(columns, dim=1)
    received = context.exchange.all_to_all_counts(counts_NC, header).tolist()
    # The host has waited for the device, and would have raised if the group had been left.
    context.finish_row_checks()
    _check_counts(received, top_k)
    return counts_NC.tolist(), received


def _check_counts(received: Sequence[Sequence[int]], top_k: int) -> None:
    """Refuse counts that no host can mean, before memory is allocated for their rows."""
    for host, counts in enumerate(received):
        for rows, expert_rows in zip(counts[::2], counts[1::2], strict=True):
            if not 0 <= rows <= expert_rows <= top_k * rows:
                raise RuntimeError(
                    f"host {host} announced {rows} rows for {expert_rows} choices of experts; each row has "
                    f"1 to {top_k} of them: they were damaged on the way. If it happens "
                    f"again, check the network between the hosts"
                )


def _column(table: Sequence[Sequence[int]], index: int) -> tuple[int, ...]:
    return tuple(row[index] for row in table)


def _chunk_slices(tokens: int, num_chunks: int) -> Sequence[slice]:
    """Cut tokens into chunks, as many on every host.

    Each chunk is a collective, also where a host has no tokens for it."""
    bounds = [tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
