"""Sums of the gradients of copies on real processes: in the order of hosts to the bit, and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experts import copies as copies_module
from experts.copies import CopiedGradients
from experts.copy_costs import held_bytes, ring_factor
from experts.moe.bank import ExpertBank, ExpertForm
from experts.moe.routed import RoutedExperts
from experts.structure import LayerStructure
from experts.tokens.exchange import GroupExchange, PendingRows
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

CPU = torch.device("cpu")
WIDTH = 5
PIECE = 24
SIZES = (3, 7, 3, 3, 1, 3)
HOSTS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 1, 3), (2,), (0, 1, 3), (1, 3), (0, 3), (0, 1, 3)),
    ((3,), (0, 1), (1,), (0,), (1, 3), (0,)),
)
"""The hosts of each expert, by layer. Some with the same hosts have others between them; host 2 has none."""


def layer_on(rank: int, hosts: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> RoutedExperts:
    structure = LayerStructure.initial("moe", SIZES)
    experts = [replace(e, hosts=own) for e, own in zip(structure.experts, hosts, strict=True)]
    structure = replace(structure, experts=tuple(experts))
    bank = ExpertBank(WIDTH, SIZES, ExpertForm(bias=True), structure.held(rank)).to(dtype)
    layer = RoutedExperts(bank)
    layer.use_structure(structure, (rank, 4))
    return layer


def gradient_of(rank: int, number: int, role: str, row: int, like: Tensor) -> Tensor:
    """The gradient that a host has computed: every process can compute those of all hosts."""
    generator = torch.Generator().manual_seed(hash((rank, number, row)) + len(role) * 7919 + ord(role[0]))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def fill(rank: int, layers: list[RoutedExperts]) -> None:
    for number, layer in enumerate(layers):
        for group, role, stack in layer.bank.stacks():
            rows = [gradient_of(rank, number, role, row, stack[0]) for row in group.rows]
            stack.grad = torch.stack(rows) if stack.requires_grad else None


def wrong_sums(layers: list[RoutedExperts], rank: int) -> list[str]:
    """Return the gradients that are not the sum of their copies in the order of hosts, to the bit."""
    wrong: list[str] = []
    for number, layer in enumerate(layers):
        for group, role, stack in layer.bank.stacks():
            if stack.grad is None:
                continue
            for place, row in enumerate(group.rows):
                hosts = layer.structure.experts[row].hosts
                expected = torch.zeros_like(stack[0])
                for host in hosts if len(hosts) > 1 else (rank,):
                    expected += gradient_of(host, number, role, row, stack[0])
                if not torch.equal(stack.grad[place], expected):
                    wrong.append(f"layer {number}, {role} of expert {row}")
    return wrong


@dataclass
class MeasuredExchange(GroupExchange):
    """An exchange that notes the bytes of each all-to-all."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def all_to_all_into(
        self, received: Tensor, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        self.sent.append(sum(send_counts))
        self.received.append(sum(receive_counts))
        return super().all_to_all_into(received, rows, send_counts, receive_counts)


def sum_on_host(rank: int, size: int, store: str, frozen: str) -> dict[str, Any]:
    copies_module.PIECE_ELEMENTS = PIECE  # this process ends with the function
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        assert world.group is not None
        dtypes = (torch.float32, torch.float64)
        layers = [layer_on(rank, hosts, dtype) for hosts, dtype in zip(HOSTS, dtypes, strict=True)]
        for layer in layers:
            for _, role, stack in layer.bank.stacks():
                stack.requires_grad_(role != frozen)
        exchange = MeasuredExchange(world.group)
        copied = CopiedGradients(layers, exchange)
        wrong = []
        for _ in range(2):  # the second sum follows the rounds of the first
            exchange.sent.clear()
            exchange.received.clear()
            fill(rank, layers)
            copied.add_up()
            wrong += wrong_sums(layers, rank)
        return {"wrong": wrong, "sent": list(exchange.sent), "received": list(exchange.received)}


def copied_bytes(rank: int, frozen: str) -> float:
    """Return the bytes that the cost formula says a host sends in a step."""
    total = 0.0
    for hosts, itemsize in zip(HOSTS, (4, 8), strict=True):
        for size, own in zip(SIZES, hosts, strict=True):
            form = ExpertForm(bias=True)
            roles = [role for role in form.roles if role != frozen]
            elements = sum(torch.Size(form.shape(role, WIDTH, size)).numel() for role in roles)
            if rank in own and len(own) > 1:
                total += ring_factor(len(own)) * elements * itemsize
    return total


@pytest.mark.parametrize("frozen", ["", "down"])
def test_copies_are_summed_in_the_order_of_hosts_and_in_pieces(frozen: str) -> None:
    results = run_ranks(sum_on_host, 4, frozen)
    assert [result["wrong"] for result in results] == [[]] * 4
    assert len({len(result["sent"]) for result in results}) == 1, "all hosts take part in each exchange"
    assert len(results[0]["sent"]) > 8, "several rounds"
    for rank, result in enumerate(results):
        assert max(result["sent"] + result["received"]) <= 8 * PIECE, "a piece at a time"
        # Shares of pieces are whole elements: the formula is met up to one element of each.
        slack = 8 * len(result["sent"]) * 3
        assert sum(result["sent"]) == pytest.approx(copied_bytes(rank, frozen), abs=slack)
    assert sum(results[2]["sent"]) == 0, "it has no copies"


def test_the_order_of_hosts_shows_in_the_sums() -> None:
    """The test above could not fail otherwise."""
    like = torch.zeros(1000)
    one, two, three = (gradient_of(rank, 0, "up", 0, like) for rank in (0, 1, 3))
    assert not torch.equal(one + two + three, three + two + one)


def disagree(rank: int, size: int, store: str) -> str:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        assert world.group is not None
        layer = layer_on(rank, ((0, 1),) * 6, torch.float32)
        layer.bank.requires_grad_(rank == 0)
        fill(rank, [layer])
        exchange = GroupExchange(world.group)
        with pytest.raises(RuntimeError) as error:
            CopiedGradients([layer], exchange).add_up()
        return str(error.value)


def test_copies_that_are_frozen_on_some_hosts_alone_are_refused() -> None:
    messages = run_ranks(disagree, 2)
    assert all("copies of the parameter up of experts differ between hosts: [2, 1]" in m for m in messages)


def test_the_formula_of_the_bytes_that_are_held() -> None:
    piece = 4.0 * copies_module.PIECE_ELEMENTS
    assert held_bytes(1000.0) == 2000.0
    assert held_bytes(1e12) == 2 * piece


@pytest.mark.parametrize(("length", "hosts"), [(1, 3), (5, 4), (41, 8), (4000, 4)])
def test_buffers_hold_the_shares_of_pieces_of_few_elements(length: int, hosts: int) -> None:
    copies: Any = SimpleNamespace(hosts=list(range(hosts)))
    piece = copies_module._Piece(copies, 0, length)
    pieces = copies_module._Round(torch.float32, [piece])
    for own in range(hosts):
        received = (hosts - 1) * piece.length(own)
        assert pieces.num_bytes >= 4 * max(received, length - piece.length(own))
    assert pieces.num_bytes < 4 * (length + hosts)
