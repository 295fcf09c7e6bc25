"""The exchange between real processes: hosts that are out of step, wrong numbers of rows, and the
meter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.model import attach, initialise, place
from experts.moe.context import MoEContext
from experts.moe.layer import MoELayer
from experts.tokens import exchange as exchange_module
from experts.tokens.exchange import GroupExchange
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

WIDTH = 6


def on_host(
    rank: int,
    size: int,
    store: str,
    act: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Call ``act(exchange, *arguments)`` on one of several hosts."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        assert world.group is not None
        return act(GroupExchange(world.group), *arguments)


def make_layer(
    exchange: GroupExchange,
    host_of: Sequence[int],
    top_k: int = 2,
    num_chunks: int = 1,
    dtype: torch.dtype = torch.float64,
) -> MoELayer:
    layer = MoELayer(WIDTH, [4] * len(host_of), top_k).to(dtype)
    initialise(layer, 3)
    attach(layer, MoEContext(exchange, num_chunks))
    place(layer, [host_of], exchange.rank)
    return layer


def make_tokens(rank: int, tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


# --- headers and counts


def forward_with(
    exchange: GroupExchange,
    options: Sequence[dict[str, Any]],
) -> tuple[str, int, int]:
    """The error of a forward pass whose options differ between hosts, with the rows and bytes
    sent."""
    own_options = options[exchange.rank]
    layer = make_layer(exchange, (0, 1, 0), **own_options)
    x_TD = make_tokens(exchange.rank, 5, own_options.get("dtype", torch.float64))
    with pytest.raises(RuntimeError) as caught:
        layer(x_TD)
    return str(caught.value), exchange.meter.rows, exchange.meter.bytes


@pytest.mark.parametrize(
    "differing",
    [{"dtype": torch.float32}, {"top_k": 3}, {"num_chunks": 2}],
    ids=["type", "top-k", "chunks"],
)
def test_hosts_with_different_settings_both_fail_and_nothing_is_sent(
    differing: dict[str, Any],
) -> None:
    errors = run_ranks(on_host, 2, forward_with, [{}, differing])
    for rank, (text, rows, num_bytes) in enumerate(errors):
        assert text.startswith(f"host {rank} is at exchange [1, ")
        assert f"host {1 - rank} at [1, " in text
        assert text.endswith("out of step; nothing was sent")
        assert (rows, num_bytes) == (0, 0)


def counts_out_of_step(exchange: GroupExchange) -> str:
    """The error of an exchange of counts in which the last host has another sequence number."""
    exchange._num_exchanges += exchange.rank // 2
    with pytest.raises(RuntimeError) as caught:
        exchange.all_to_all_counts(torch.zeros(exchange.size, 2, dtype=torch.int64), (5,))
    return str(caught.value)


def test_every_host_names_the_one_that_is_out_of_step() -> None:
    first, second, third = run_ranks(on_host, 3, counts_out_of_step)
    assert first == "host 0 is at exchange [1, 5], host 2 at [2, 5]: out of step; nothing was sent"
    assert second == "host 1 is at exchange [1, 5], host 2 at [2, 5]: out of step; nothing was sent"
    assert third == "host 2 is at exchange [2, 5], host 0 at [1, 5]: out of step; nothing was sent"


def exchange_counts_of(exchange: GroupExchange, counts: Sequence[int]) -> str:
    """The error of an exchange in which the second host sends these counts to all."""
    own_counts = counts if exchange.rank == 1 else [1, 2]
    counts_NC = torch.tensor([own_counts] * exchange.size)
    with pytest.raises(RuntimeError) as caught:
        exchange.all_to_all_counts(counts_NC, (5,))
    return str(caught.value)


@pytest.mark.parametrize("counts", [(-1, 3), (4, 2**31), (0, -(2**63))], ids=str)
def test_counts_that_no_host_can_mean_are_refused(counts: tuple[int, int]) -> None:
    errors = run_ranks(on_host, 2, exchange_counts_of, counts)
    for rank, text in enumerate(errors):
        assert text.startswith(f"host 1 sent counts from {min(counts)} to {max(counts)} to host {rank}; ")


def send_other_number(exchange: GroupExchange, announced: int) -> tuple[str, int]:
    with pytest.raises(RuntimeError) as caught:
        exchange.all_to_all_rows(torch.zeros(3, 4), [announced, 0], [1, 1])
    return str(caught.value), exchange.meter.rows


@pytest.mark.parametrize("announced", [2, 4])
def test_rows_other_than_announced_are_not_sent(announced: int) -> None:
    errors = run_ranks(on_host, 2, send_other_number, announced)
    message = f"{announced} rows were announced to the other hosts; there are 3 to send"
    assert errors == [(message, 0)] * 2


# --- the meter


def metered_pass(
    exchange: GroupExchange, host_of: Sequence[int], tokens: Sequence[int], num_chunks: int
) -> list[Any]:
    """The gate's choices, and the meter after the forward and after the backward pass."""
    layer = make_layer(exchange, host_of, num_chunks=num_chunks)
    x_TD = make_tokens(exchange.rank, tokens[exchange.rank]).requires_grad_()
    y_TD, routing = layer(x_TD)
    forward = exchange.meter.take()
    (y_TD * y_TD).sum().backward()
    backward = exchange.meter.take()
    assert exchange.meter.take() == (0, 0, 0.0)
    return [routing.experts_TK.tolist(), forward, backward]


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(
    ("host_of", "tokens"),
    [((0, 1, 1, 0, 1), (9, 4)), ((0, 0, 0), (7, 5)), ((1, 2, 2, 0), (3, 0, 8))],
    ids=["two hosts", "one without experts", "three hosts"],
)
def test_the_meter_counts_rows_that_leave_the_host(
    host_of: Sequence[int], tokens: Sequence[int], num_chunks: int
) -> None:
    """A row for each token and each other host with experts for it, however many; none for rows
    that stay."""
    results = run_ranks(on_host, len(tokens), metered_pass, host_of, tokens, num_chunks)
    num_hosts = len(tokens)
    sent = [[0] * num_hosts for _ in range(num_hosts)]  # by sender and receiver
    for sender, (choices, _, _) in enumerate(results):
        for chosen in choices:
            for receiver in {host_of[expert] for expert in chosen}:
                sent[sender][receiver] += 1
    features, weights, ids = WIDTH * 8, 2 * 8, 2 * 4
    for rank, (_, forward, backward) in enumerate(results):
        outgoing = sum(sent[rank]) - sent[rank][rank]
        incoming = sum(row[rank] for row in sent) - sent[rank][rank]
        assert forward[:2] == (
            outgoing * (features + weights + ids) + incoming * features,
            outgoing + incoming,
        )
        assert backward[:2] == (
            outgoing * features + incoming * (features + weights),
            outgoing + incoming,
        )
        assert forward[2] > 0
    assert any(row[rank] for rank, row in enumerate(sent)), "some rows stay"


def pass_with_local_experts(exchange: GroupExchange) -> tuple[int, int, float]:
    layer = make_layer(exchange, (exchange.rank,) * 3)
    y_TD, _ = layer(make_tokens(exchange.rank, 8))
    y_TD.sum().backward()
    return exchange.meter.take()


def test_rows_that_stay_on_a_host_are_not_metered() -> None:
    """Each host believes that it has all experts."""
    for num_bytes, rows, seconds in run_ranks(on_host, 2, pass_with_local_experts):
        assert (num_bytes, rows) == (0, 0)
        assert seconds > 0, "counts are exchanged all the same"


def send_bytes(exchange: GroupExchange) -> tuple[int, int]:
    counts = [10, 10]
    exchange.all_to_all_rows(torch.zeros(20, dtype=torch.uint8), counts, counts).wait()
    return exchange.meter.take()[:2]


def test_plain_bytes_are_no_rows() -> None:
    """Moved experts and gradients of copies are sent as bytes: 10 bytes are not 10 tokens."""
    assert run_ranks(on_host, 2, send_bytes) == [(10, 0)] * 2


# --- with a group that records its calls


class RecordedGroup:
    """A group of one host that is asked in this order; its clock advances while it waits."""

    rank = 0
    size = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.now = 100.0
        monkeypatch.setattr(exchange_module, "perf_counter", lambda: self.now)

    def all_to_all(self, received: Tensor, sent: Tensor, *_: Any) -> RecordedGroup:
        received.copy_(sent)
        self.calls.append("all_to_all")
        return self

    def wait(self) -> None:
        self.calls.append("wait")
        self.now += 0.25

    def check(self) -> None:
        self.calls.append("check")


def test_an_aborted_group_is_noticed_after_the_counts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an abort ends the wait with wrong counts."""
    group: Any = RecordedGroup(monkeypatch)
    exchange = GroupExchange(group)
    assert exchange.all_to_all_counts(torch.tensor([[3, 4]]), [7]).tolist() == [[3, 4]]
    assert group.calls == ["all_to_all", "wait", "check"]
    assert exchange.all_to_all_counts(torch.tensor([[5]]), [7]).tolist() == [[5]]
    assert exchange.meter.take() == (0, 0, 0.5)
    assert exchange.meter.take() == (0, 0, 0.0)


def test_rows_are_waited_for_once_and_then_released(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = RecordedGroup(monkeypatch)
    exchange = GroupExchange(group)
    pending = exchange.all_to_all_rows(torch.ones(2, 3), [2], [2])
    assert pending.sent is not None, "the collective still reads them"
    for _ in range(2):
        assert pending.wait().tolist() == [[1.0] * 3] * 2
        assert pending.sent is None
    assert group.calls == ["all_to_all", "wait"]
    assert exchange.meter.seconds == 0.25
