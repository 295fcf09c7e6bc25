"""Who goes where, and what is told before: room under a capacity, parts, rows that travel once to a host, and the meter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.context import MoEContext, StepContext
from experts.exchange import GroupExchange, Layout, LocalExchange, Meter, PendingRows
from experts.layer import MoELayer
from experts.model import attach, initialise, place
from experts.token_exchange import TokenExchange, _cut, kept_choices
from experts.types import Routing
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import process_group_world
from tests.support.oracle import kept_oracle
from tests.support.ranks import run_ranks

WIDTH = 6


# --- capacity


@dataclass
class Told:
    """One of several hosts, the others of which have said what they say."""

    rank: int
    tables: list[list[int]]
    """What each host tells all others."""
    calls: int = 0

    @property
    def size(self) -> int:
        return len(self.tables)

    def counts(self, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        assert mine_NC.tolist() == [self.tables[self.rank]] * self.size
        self.calls += 1
        return self.tables

    def rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> PendingRows:
        raise AssertionError("only counts are told")


def table(choices: Sequence[Sequence[int]], top_k: int, experts: int) -> list[int]:
    """How many tokens chose each expert first, second and so on."""
    return [sum(chosen[k] == e for chosen in choices) for k in range(top_k) for e in range(experts)]


def drawn(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """Choices that prefer the experts in front."""
    return [sorted(range(experts), key=lambda e: draw.random() * (1 + e))[:top_k] for _ in range(tokens)]


@pytest.mark.parametrize("seed", range(60))
def test_the_room_of_experts_is_given_out_in_order(seed: int) -> None:
    draw = random.Random(seed)
    hosts, experts = draw.randint(1, 4), draw.randint(1, 9)
    top_k, capacity = draw.randint(1, experts), draw.choice([0.1, 0.5, 1.0, 1.25, 2.0])
    choices = [drawn(draw, draw.choice([0, 1, 5, 12]), experts, top_k) for _ in range(hosts)]
    silent = {host for host in range(hosts) if hosts > 1 and draw.random() < 0.2}
    heard = [chosen for host in range(hosts) if host not in silent for chosen in choices[host]]
    expected = iter(kept_oracle(heard, experts, capacity))
    tables = [table(() if host in silent else choices[host], top_k, experts) for host in range(hosts)]
    for host in range(hosts):
        experts_TK = torch.tensor(choices[host], dtype=torch.int64).view(-1, top_k)
        exchange = Told(host, tables) if hosts > 1 else LocalExchange()
        context = MoEContext(exchange, step=StepContext(dummy=host in silent))
        found = kept_choices(experts_TK, experts, capacity, context)
        assert found.shape == experts_TK.shape
        if host not in silent:
            assert found.tolist() == [next(expected) for _ in choices[host]]
        if isinstance(exchange, Told):
            assert exchange.calls == 1, "all hosts come by once, whoever has tokens"


def test_first_choices_go_before_second_ones() -> None:
    """Room for two: the second choice of the first token waits for the first choices of all others."""
    choices = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    kept = kept_choices(choices, 2, 0.5, MoEContext())
    assert kept.tolist() == [[True, False], [True, True], [True, False], [False, False]]


# --- parts


@pytest.mark.parametrize(("tokens", "parts"), [(10, 1), (10, 3), (2, 5), (0, 4), (7, 7)])
def test_parts_cover_the_tokens_in_order(tokens: int, parts: int) -> None:
    slices = _cut(tokens, parts)
    assert len(slices) == parts, "as many on every host"
    assert [token for part in slices for token in range(tokens)[part]] == list(range(tokens))
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


# --- who goes where


@dataclass
class Post:
    """One of several hosts, alone: takes down what it sends, and nothing comes."""

    rank: int
    size: int
    told: list[list[list[int]]] = field(default_factory=list)
    agreed: list[tuple[int, ...]] = field(default_factory=list)
    sent: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)

    def counts(self, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        self.told.append(mine_NC.tolist())
        self.agreed.append(tuple(agreed))
        return torch.zeros_like(mine_NC).tolist()

    def rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> PendingRows:
        assert sum(sends) == len(rows)
        assert not any(receives)
        self.sent.append((rows.clone(), tuple(sends)))
        return PendingRows(rows[:0], None, Meter())


def routed(tokens: int, experts: int, top_k: int, seed: int = 1) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    experts_TK = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    zero = torch.zeros(())
    return Routing(
        experts_TK, weights_TK, torch.bincount(experts_TK.reshape(-1), minlength=experts), zero, zero
    )


def set_out(routing: Routing, host_E: Tensor, size: int, chunks: int = 1, **how: Any) -> tuple[Post, Tensor]:
    post, x_TD = (
        Post(0, size),
        torch.randn(len(routing.experts_TK), WIDTH, generator=torch.Generator().manual_seed(2)),
    )
    crossing = TokenExchange.of(x_TD, routing, host_E, how.pop("kept", None), MoEContext(post, chunks, **how))
    crossing.set_out()
    return post, x_TD


def unpacked(packed: Tensor, layout: Layout, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    def part(begin: int, columns: int, dtype: torch.dtype) -> Tensor:
        return packed[:, begin : begin + columns * dtype.itemsize].contiguous().view(dtype)

    return (
        part(layout.features, WIDTH, torch.float32),
        part(layout.weights, top_k, torch.float32),
        part(layout.ids, top_k, torch.int32),
    )


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize(("tokens", "top_k"), [(17, 4), (3, 1), (0, 2), (9, 7)])
def test_a_token_travels_once_to_each_host_that_wants_it(tokens: int, top_k: int, chunks: int) -> None:
    """With the ids and weights of the experts there: sorted by host, and then by token."""
    host_E, size = torch.tensor([0, 2, 2, 2, 1, 0, 2]), 4  # the last host has no experts
    routing = routed(tokens, 7, top_k)
    post, x_TD = set_out(routing, host_E, size, chunks)
    assert len(post.sent) == chunks
    layout = Layout.of(x_TD, routing.weights_TK)
    assert post.agreed == [(0, len(host_E), layout.size, chunks)]
    for number, (part, (packed, sends)) in enumerate(zip(_cut(tokens, chunks), post.sent, strict=True)):
        chosen = {t: routing.experts_TK[t].tolist() for t in range(tokens)[part]}
        expected = [
            (host, t) for host in range(size) for t in chosen if any(host_E[e] == host for e in chosen[t])
        ]
        assert sends == tuple(sum(host == n for host, _ in expected) for n in range(size))
        assert len(packed) == len(expected) <= len(chosen) * min(top_k, 3)
        rows_SD, weights_SK, ids_SK = unpacked(packed, layout, top_k)
        for row, (host, t) in enumerate(expected):
            assert torch.equal(rows_SD[row], x_TD[t])
            assert torch.equal(weights_SK[row], routing.weights_TK[t])
            assert ids_SK[row].tolist() == [e if host_E[e] == host else -1 for e in chosen[t]]
        pairs = [sum(int(host_E[e]) == n for es in chosen.values() for e in es) for n in range(size)]
        assert [told[2 * number : 2 * number + 2] for told in post.told[0]] == [
            list(both) for both in zip(sends, pairs, strict=True)
        ]


def test_what_was_dropped_does_not_travel_and_a_silent_host_sends_nothing() -> None:
    routing, host_E = routed(12, 4, 2), torch.tensor([0, 1, 1, 0])
    kept_TK = torch.rand(12, 2, generator=torch.Generator().manual_seed(4)) < 0.5
    post, _ = set_out(routing, host_E, 2, kept=kept_TK)
    hosts = [
        {int(host_E[e]) for e, kept in zip(*both, strict=True) if kept}
        for both in zip(routing.experts_TK, kept_TK, strict=True)
    ]
    assert post.sent[0][1] == tuple(sum(n in wanted for wanted in hosts) for n in range(2))
    assert sum(pairs for _, pairs in post.told[0]) == int(kept_TK.sum())
    quiet, _ = set_out(routing, host_E, 2, step=StepContext(dummy=True))
    assert quiet.sent[0][1] == (0, 0)
    assert quiet.told[0] == [[0, 0], [0, 0]]


# --- real hosts


def together(rank: int, size: int, store: str, act: Callable[..., Any], *arguments: Any) -> Any:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        assert world.group is not None
        return act(GroupExchange(world.group), *arguments)


def layer_on(
    exchange: GroupExchange,
    host_of: Sequence[int],
    top_k: int = 2,
    chunks: int = 1,
    dtype: torch.dtype = torch.float64,
) -> MoELayer:
    layer = MoELayer(WIDTH, [4] * len(host_of), top_k).to(dtype)
    initialise(layer, 3)
    attach(layer, MoEContext(exchange, chunks))
    place(layer, [host_of], exchange.rank)
    return layer


def tokens_on(rank: int, tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(
        dtype
    )


def other_mind(exchange: GroupExchange, options: Sequence[dict[str, Any]]) -> tuple[str, int, int]:
    """What a host says whose options are not those of the others."""
    mine = options[exchange.rank]
    layer = layer_on(exchange, (0, 1, 0), **mine)
    with pytest.raises(RuntimeError) as caught:
        layer(tokens_on(exchange.rank, 5, mine.get("dtype", torch.float64)))
    return str(caught.value), exchange.meter.rows, exchange.meter.bytes


@pytest.mark.parametrize("differing", [{"dtype": torch.float32}, {"top_k": 3}], ids=["type", "top-k"])
def test_hosts_of_different_minds_are_told_on_both_sides_and_nothing_travels(
    differing: dict[str, Any],
) -> None:
    answers = run_ranks(together, 2, other_mind, [{}, differing])
    for rank, (text, rows, size) in enumerate(answers):
        assert text.startswith(f"host {rank} is at exchange [1, ")
        assert f"host {1 - rank} at [1, " in text
        assert text.endswith("out of step; nothing was sent")
        assert (rows, size) == (0, 0)


def test_hosts_that_cut_into_other_parts_are_told() -> None:
    answers = run_ranks(together, 2, other_mind, [{}, {"chunks": 2}])
    assert all("out of step" in text for text, *_ in answers)


def out_of_step(exchange: GroupExchange) -> str:
    """The last host comes with an exchange of another number."""
    exchange._number += exchange.rank // 2
    with pytest.raises(RuntimeError) as caught:
        exchange.counts(torch.zeros(exchange.size, 2, dtype=torch.int64), (5,))
    return str(caught.value)


def test_a_host_that_is_out_of_step_is_named_by_all() -> None:
    first, second, third = run_ranks(together, 3, out_of_step)
    assert first == "host 0 is at exchange [1, 5], host 2 at [2, 5]: out of step; nothing was sent"
    assert second == "host 1 is at exchange [1, 5], host 2 at [2, 5]: out of step; nothing was sent"
    assert third == "host 2 is at exchange [2, 5], host 0 at [1, 5]: out of step; nothing was sent"


def broken_promise(exchange: GroupExchange, promised: int) -> tuple[str, int]:
    with pytest.raises(RuntimeError) as caught:
        exchange.rows(torch.zeros(3, 4), [promised, 0], [1, 1])
    return str(caught.value), exchange.meter.rows


@pytest.mark.parametrize("promised", [2, 4])
def test_rows_that_are_not_as_many_as_were_promised_do_not_leave(promised: int) -> None:
    answers = run_ranks(together, 2, broken_promise, promised)
    assert answers == [(f"{promised} rows were promised to the others, and there are 3", 0)] * 2


def metered(exchange: GroupExchange, host_of: Sequence[int], tokens: Sequence[int], chunks: int) -> list[Any]:
    """The gate's choices, and what the meter shows after the forward and after the backward pass."""
    layer = layer_on(exchange, host_of, chunks=chunks)
    x_TD = tokens_on(exchange.rank, tokens[exchange.rank]).requires_grad_()
    y_TD, routing = layer(x_TD)
    out = exchange.meter.take()
    (y_TD * y_TD).sum().backward()
    back = exchange.meter.take()
    assert exchange.meter.take() == (0, 0, 0.0)
    return [routing.experts_TK.tolist(), out, back]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("host_of", "tokens"),
    [((0, 1, 1, 0, 1), (9, 4)), ((0, 0, 0), (7, 5)), ((1, 2, 2, 0), (3, 0, 8))],
    ids=["two hosts", "one without experts", "three hosts"],
)
def test_the_meter_counts_what_left_the_host(
    host_of: Sequence[int], tokens: Sequence[int], chunks: int
) -> None:
    """A row for each token and other host with experts for it, however many; none for what stayed."""
    answers = run_ranks(together, len(tokens), metered, host_of, tokens, chunks)
    goes = [
        [sum(any(host_of[e] == to for e in chosen) for chosen in answer[0]) for to in range(len(tokens))]
        for answer in answers
    ]
    features, weights, ids = WIDTH * 8, 2 * 8, 2 * 4
    for rank, (_, out, back) in enumerate(answers):
        sent = sum(goes[rank]) - goes[rank][rank]
        handled = sum(row[rank] for row in goes) - goes[rank][rank]
        assert out[:2] == (sent * (features + weights + ids) + handled * features, sent + handled)
        assert back[:2] == (sent * features + handled * (features + weights), sent + handled)
        assert out[2] > 0
    assert any(row[rank] for rank, row in enumerate(goes)), "some stayed"


def at_home(exchange: GroupExchange) -> tuple[int, int, float]:
    layer = layer_on(exchange, (exchange.rank,) * 3)
    y_TD, _ = layer(tokens_on(exchange.rank, 8))
    y_TD.sum().backward()
    return exchange.meter.take()


def test_what_stays_on_a_host_is_not_metered() -> None:
    """Each takes itself for the home of all experts."""
    for size, rows, seconds in run_ranks(together, 2, at_home):
        assert (size, rows) == (0, 0)
        assert seconds > 0, "they met all the same"
