"""The tokens of a layer on their way to the hosts of their experts and back.

They are sent in one chunk or in several. A token is sent once to each host that has experts for it,
with their ids and weights. It comes back once from each such host, as the weighted sum of the
experts' outputs; these sums are added in the order of hosts. See ``types`` for the letters of
shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.moe.context import MoEContext
from experts.moe.token_parts import TokenPart, chunk_of_host, selected
from experts.tokens.bounds import HEADER_BYTES, RowBound
from experts.tokens.destinations import Destinations
from experts.tokens.dispatch import sum_rows
from experts.tokens.received_rows import RowCheck
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
    num_rows: int | None
    """Rows for this host's experts among the received tokens: a token counts once for each of
    them. None: the device alone knows, and ``bound`` limits them."""
    anchor: Tensor
    context: MoEContext
    bound: RowBound | None = None
    counts_N2: Tensor | None = None
    """Rows, and rows for experts, to each host, for the header of bounded rows."""
    layer_id: int = 0
    is_empty: bool = False
    """Whether this host has no tokens; a padding token stands for them."""
    _ticket: Tensor | None = None

    def send(self) -> None:
        if not self.context.replaying:
            self.outbound.header_N4 = self._header()
            self._ticket = send(self.x_TD, self.weights_TK, self.ids_SK, self.anchor, self.outbound)

    def _header(self) -> Tensor | None:
        """Return the numbers that go to each host with bounded rows."""
        if self.counts_N2 is None or self.context.bounds is None:
            return None
        number = self.context.bounds.next_number()
        columns = [torch.full_like(self.counts_N2[:, 0], value) for value in (number, self.layer_id)]
        return torch.stack([*columns, *self.counts_N2.unbind(1)], dim=1)

    def check_choices(self, layer_name: str, ids_GK: Tensor, slots_GK: Tensor) -> None:
        """Start the check of received ids of experts, and of their number."""
        if self.bound is None:
            assert self.num_rows is not None
            counts = self.outbound.plan.receive_counts
            check = RowCheck.start(layer_name, ids_GK, slots_GK, counts, self.num_rows)
            self.context.row_checks.append(check)
            return
        sent_N4, received_N4 = self.outbound.header_N4, self.outbound.received_header_N4
        assert self.context.bounds is not None, "bounded rows without bounds"
        assert sent_N4 is not None, "check before send"
        assert received_N4 is not None, "check before receive"
        choices = (ids_GK, slots_GK)
        self.context.bounds.add_headers(self.layer_id, self.bound, received_N4, sent_N4, choices)

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
        y_TD = sum_rows(rows_SD, self.outbound.plan.row_map)
        return y_TD[:0] if self.is_empty else y_TD


@dataclass
class TokenExchange:
    """All chunks of a layer's tokens."""

    chunks: list[ExchangeChunk]
    chunk_T: Tensor | None = None
    """The chunk of each token where chunks are groups of hosts; None if each has tokens that follow each
    other."""

    @classmethod
    def plan(
        cls,
        x_TD: Tensor,
        choices: Choices,
        host_TK: Tensor,
        context: MoEContext,
        header: tuple[int, ...] = (),
    ) -> TokenExchange:
        """Decide the rows to send, and exchange their counts with all hosts, if they have no bound.

        All hosts must call it. ``host_TK`` is the host of each choice, -1 for one that is dropped.
        ``header`` describes the layer, its id first; it must be the same on all hosts."""
        exchange = context.exchange
        if context.step.dummy:
            host_TK = torch.full_like(host_TK, -1)
        tokens = TokenPart(x_TD, choices.weights_TK, choices.experts_TK, host_TK)
        chunk_T = None
        if context.by_choice and context.num_chunks > 1:
            num_chunks = min(context.num_chunks, exchange.size)
            chunk_T = chunk_of_host(host_TK.squeeze(1), exchange.rank, exchange.size, num_chunks)
            parts = tokens.by_chunk(chunk_T, num_chunks)
        else:
            parts = tokens.in_order(context.num_chunks)
        layout = Layout.of(x_TD, choices.weights_TK)
        layer_id = header[0] if header else 0
        bound = context.bounds.of_layer(layer_id) if context.bounds is not None else None
        anchor = x_TD.new_zeros((), requires_grad=torch.is_grad_enabled())
        if bound is not None and layout.size >= HEADER_BYTES:
            bounded = [_bounded_chunk(part.padded(), bound, layer_id, anchor, context) for part in parts]
            return cls(bounded, chunk_T)
        destinations = [Destinations.of(part.host_TK, exchange.size) for part in parts]
        header = (*header, layout.size, len(parts))
        top_k = choices.experts_TK.shape[1]
        sent, received = context.replayed(lambda: _exchange_counts(context, destinations, header, top_k))
        chunks: list[ExchangeChunk] = []
        for number, (part, destination) in enumerate(zip(parts, destinations, strict=True)):
            send_counts = _column(sent, 2 * number)
            receive_counts = _column(received, 2 * number)
            num_rows = sum(_column(received, 2 * number + 1))
            if context.bounds is not None and not context.replaying:
                context.bounds.add_counts(layer_id, receive_counts, num_rows)
            plan = destination.transfer_plan(send_counts, receive_counts)
            chunk = ExchangeChunk(
                x_TD=part.x_TD,
                weights_TK=part.weights_TK,
                ids_SK=destination.expert_ids(part.experts_TK, plan),
                outbound=Transfer(exchange, plan),
                inbound=Transfer(exchange, plan),
                num_rows=num_rows,
                anchor=anchor,
                context=context,
            )
            chunks.append(chunk)
        return cls(chunks, chunk_T)

    def send(self) -> None:
        for chunk in self.chunks:
            chunk.send()

    def receive_back(self) -> Tensor:
        outputs = [chunk.receive_back() for chunk in self.chunks]
        if len(outputs) == 1:
            return outputs[0]
        if self.chunk_T is None:
            return torch.cat(outputs)
        return selected(outputs, self.chunk_T)


def _bounded_chunk(
    part: TokenPart, bound: RowBound, layer_id: int, anchor: Tensor, context: MoEContext
) -> ExchangeChunk:
    """Return the chunk of rows whose counts no host knows."""
    destinations = Destinations.of(part.host_TK, context.exchange.size)
    plan, ids_SK = destinations.bounded_plan(part.experts_TK, bound)
    return ExchangeChunk(
        x_TD=part.x_TD,
        weights_TK=part.weights_TK,
        ids_SK=ids_SK,
        outbound=Transfer(context.exchange, plan),
        inbound=Transfer(context.exchange, plan),
        num_rows=None,
        anchor=anchor,
        context=context,
        bound=bound,
        counts_N2=torch.stack([destinations.rows_N, destinations.expert_rows_N], dim=1),
        layer_id=layer_id,
        is_empty=part.is_empty,
    )


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
