"""Experts on their way between hosts: who sends them, and in which pieces."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from experts.moe.bank import ExpertBank
from experts.moe.context import MoEContext
from experts.moe.routed import RoutedExperts
from experts.structure import LayerStructure
from experts.surgery import expert_transfer
from experts.surgery.expert_transfer import Move, Slot, StateSpec, exchange_experts, needed_moves
from experts.tokens.exchange import GroupExchange
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

SIZES = (3, 8)


def on_hosts(*hosts: tuple[int, ...]) -> LayerStructure:
    layer = LayerStructure.initial("moe", SIZES[: len(hosts)])
    experts = [replace(expert, hosts=own) for expert, own in zip(layer.experts, hosts, strict=True)]
    return replace(layer, experts=tuple(experts))


def test_the_hosts_of_an_expert_share_the_sending() -> None:
    """As the costs of a change reckon."""
    old = on_hosts((1, 4))
    moves = needed_moves(old, on_hosts((0, 1, 2, 3, 4, 5)), {0: (0,)})
    assert moves == [Move(1, 0, 0), Move(1, 3, 0), Move(4, 2, 0), Move(4, 5, 0)]
    many = needed_moves(on_hosts((0, 1, 2)), on_hosts(tuple(range(30))), {0: (0,)})
    assert set(Counter(move.sender for move in many).values()) == {9}


OLD = on_hosts((0, 1), (2,))
NEW = on_hosts((0, 1, 2, 3), (0, 1, 3))
SPEC = StateSpec((Slot("moment", torch.float64, False), Slot("step", torch.float32, True, True)))


def state_of(expert: int, like: Tensor) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(expert)
    bank = ExpertBank(5, SIZES)
    tensors: dict[tuple[str, str], Tensor] = {}
    for role in bank.form.roles:
        shape = bank.form.shape(role, 5, SIZES[expert])
        tensors["", role] = torch.randn(shape, generator=generator).to(like.dtype)
        tensors["moment", role] = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors["step", role] = torch.tensor(float(expert + 1))
    return tensors


def transfer_on_host(rank: int, size: int, store: str) -> tuple[list[int], bool, int]:
    expert_transfer._SENT_BYTES = 300  # this process ends with the function
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        assert world.group is not None
        layer = RoutedExperts(ExpertBank(5, SIZES))
        exchange = GroupExchange(world.group)
        layer.context = MoEContext(exchange)
        spec = replace(SPEC, dtype=torch.float32)
        own = {expert: state_of(expert, torch.zeros(1)) for expert in OLD.held(rank)}
        received = exchange_experts(layer, OLD, NEW, {0: (0,), 1: (1,)}, own, spec)
        is_equal = all(
            torch.equal(tensor, state_of(expert, torch.zeros(1))[key])
            for expert, tensors in received.items()
            for key, tensor in tensors.items()
        )
        return sorted(received), is_equal, exchange.meter.bytes


def test_experts_arrive_whole_however_small_the_pieces_are() -> None:
    results = run_ranks(transfer_on_host, 4)
    assert [(ids, is_equal) for ids, is_equal, _ in results] == [
        ([1], True),
        ([1], True),
        ([0], True),
        ([0, 1], True),
    ]
    sent = [num_bytes for _, _, num_bytes in results]
    assert sent[0] == sent[1] > 0, "both holders of expert 0 send it once"
    assert sent[3] == 0
