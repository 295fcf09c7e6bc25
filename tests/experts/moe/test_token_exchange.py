"""The plan of a token exchange: chunks, and rows that are sent once to each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from experts.moe.context import MoEContext, StepContext
from experts.moe.token_exchange import TokenExchange
from experts.moe.token_parts import chunk_of_host, chunk_slices
from experts.tokens.exchange import Meter, PendingRows
from experts.tokens.transfer import Layout
from experts.types import Routing

WIDTH = 6


# --- chunks


@pytest.mark.parametrize(("tokens", "num_chunks"), [(10, 1), (10, 3), (2, 5), (0, 4), (7, 7)])
def test_chunks_cover_the_tokens_in_order(tokens: int, num_chunks: int) -> None:
    slices = chunk_slices(tokens, num_chunks)
    assert len(slices) == num_chunks, "as many on every host"
    assert [token for part in slices for token in range(tokens)[part]] == list(range(tokens))
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_hosts", "num_chunks"), [(2, 2), (3, 2), (5, 3), (4, 4)])
def test_chunks_of_hosts_have_as_many_hosts_on_each_and_begin_with_the_own_rows(
    num_hosts: int, num_chunks: int
) -> None:
    hosts_T = torch.tensor([*range(num_hosts), -1])
    of_rank = [chunk_of_host(hosts_T, rank, num_hosts, num_chunks).tolist() for rank in range(num_hosts)]
    for rank, chunks in enumerate(of_rank):
        assert chunks[rank] == 0
        assert chunks[-1] == -1, "a dropped row is in no chunk"
        assert set(chunks[:-1]) == set(range(num_chunks))
        assert sorted(chunks) == sorted(of_rank[0])


# --- rows


@dataclass
class RecordingExchange:
    """An exchange that records what this host sends. The other hosts send nothing."""

    rank: int
    size: int
    counts: list[list[list[int]]] = field(default_factory=list)
    headers: list[tuple[int, ...]] = field(default_factory=list)
    sent: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        self.counts.append(counts_NC.tolist())
        self.headers.append(tuple(header))
        return torch.zeros_like(counts_NC)

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        assert sum(send_counts) == len(rows)
        assert not any(receive_counts)
        self.sent.append((rows.clone(), tuple(send_counts)))
        return PendingRows(rows[:0], None, Meter())


def make_routing(tokens: int, experts: int, top_k: int) -> Routing:
    generator = torch.Generator().manual_seed(1)
    experts_TK = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    counts_E = torch.bincount(experts_TK.reshape(-1), minlength=experts)
    zero = torch.zeros(())
    return Routing(experts_TK, weights_TK, counts_E, zero, zero)


def record_send(
    routing: Routing,
    host_E: Tensor,
    context: MoEContext,
    kept_TK: Tensor | None = None,
) -> tuple[RecordingExchange, Tensor]:
    """Send tokens, and return the exchange that recorded them with the tokens."""
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(len(routing.experts_TK), WIDTH, generator=generator)
    host_TK = host_E[routing.experts_TK]
    if kept_TK is not None:
        host_TK = torch.where(kept_TK, host_TK, -1)
    TokenExchange.plan(x_TD, routing, host_TK, context, (0, len(host_E))).send()
    assert isinstance(context.exchange, RecordingExchange)
    return context.exchange, x_TD


def unpack(packed: Tensor, layout: Layout, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, weights and ids of packed rows."""

    def section(begin: int, columns: int, dtype: torch.dtype) -> Tensor:
        return packed[:, begin : begin + columns * dtype.itemsize].contiguous().view(dtype)

    return (
        section(0, WIDTH, torch.float32),
        section(layout.weights, top_k, torch.float32),
        section(layout.ids, top_k, torch.int32),
    )


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize(("tokens", "top_k"), [(17, 4), (3, 1), (0, 2), (9, 7)])
def test_a_token_is_sent_once_to_each_host_of_its_experts(
    tokens: int,
    top_k: int,
    num_chunks: int,
) -> None:
    """With the ids and weights of the experts there; rows are sorted by host, and then by token."""
    host_E = torch.tensor([0, 2, 2, 2, 1, 0, 2])
    size = 4  # the last host has no experts
    routing = make_routing(tokens, len(host_E), top_k)
    exchange, x_TD = record_send(routing, host_E, MoEContext(RecordingExchange(0, size), num_chunks))
    layout = Layout.of(x_TD, routing.weights_TK)
    assert len(exchange.sent) == num_chunks
    assert exchange.headers == [(0, len(host_E), layout.size, num_chunks)]
    slices = chunk_slices(tokens, num_chunks)
    for number, (part, (packed, send_counts)) in enumerate(zip(slices, exchange.sent, strict=True)):
        chosen = {t: routing.experts_TK[t].tolist() for t in range(tokens)[part]}
        expected = [
            (host, t) for host in range(size) for t in chosen if any(host_E[e] == host for e in chosen[t])
        ]
        assert send_counts == tuple(sum(host == n for host, _ in expected) for n in range(size))
        assert len(packed) == len(expected) <= len(chosen) * min(top_k, 3)
        rows_SD, weights_SK, ids_SK = unpack(packed, layout, top_k)
        for row, (host, t) in enumerate(expected):
            assert torch.equal(rows_SD[row], x_TD[t])
            assert torch.equal(weights_SK[row], routing.weights_TK[t])
            assert ids_SK[row].tolist() == [e if host_E[e] == host else -1 for e in chosen[t]]
        for host in range(size):
            expert_rows = sum(int(host_E[e]) == host for experts in chosen.values() for e in experts)
            columns = exchange.counts[0][host][2 * number : 2 * number + 2]
            assert columns == [send_counts[host], expert_rows]


def test_dropped_choices_are_not_sent() -> None:
    routing = make_routing(12, 4, 2)
    host_E = torch.tensor([0, 1, 1, 0])
    kept_TK = torch.rand(12, 2, generator=torch.Generator().manual_seed(4)) < 0.5
    exchange, _ = record_send(routing, host_E, MoEContext(RecordingExchange(0, 2)), kept_TK)
    hosts_T = [
        {int(host_E[expert]) for expert, kept in zip(experts_K, kept_K, strict=True) if kept}
        for experts_K, kept_K in zip(routing.experts_TK, kept_TK, strict=True)
    ]
    _, send_counts = exchange.sent[0]
    assert send_counts == tuple(sum(host in hosts for hosts in hosts_T) for host in range(2))
    assert sum(expert_rows for _, expert_rows in exchange.counts[0]) == int(kept_TK.sum())


def test_a_dummy_pass_sends_nothing() -> None:
    context = MoEContext(RecordingExchange(0, 2), step=StepContext(dummy=True))
    exchange, _ = record_send(make_routing(12, 4, 2), torch.tensor([0, 1, 1, 0]), context)
    _, send_counts = exchange.sent[0]
    assert send_counts == (0, 0)
    assert exchange.counts[0] == [[0, 0], [0, 0]]
