"""Experts on their way from host to host: their weights and optimizer state, from device to device."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experts.moe.routed import RoutedExperts
from experts.structure import LayerStructure
from experts.tokens.exchange import Exchange

ExpertTensors = dict[tuple[str, str], Tensor]
"""The tensors of one expert by slot and role. The weights have the slot ""."""


@dataclass(frozen=True)
class Slot:
    """A tensor that an optimizer keeps of each stack: like it, one scalar, or a few numbers of each row."""

    name: str
    dtype: torch.dtype
    is_scalar: bool
    on_host: bool = False
    """Whether it is in host memory, as some optimizers have their step counters."""
    roles: tuple[str, ...] | None = None
    """The roles whose stacks have it; None for all. Muon keeps other tensors of biases than of matrices."""
    block: int = 1
    """Numbers of an expert's weights that share one number of the slot."""

    def shape(self, weights: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape for one expert whose weights have the given shape."""
        if self.is_scalar:
            return ()
        return weights if self.block == 1 else (-(-math.prod(weights) // self.block),)


@dataclass(frozen=True)
class StateSpec:
    """The weights of a layer's experts and the state that the optimizer keeps of them, on all hosts."""

    slots: tuple[Slot, ...] = ()
    dtype: torch.dtype | None = None
    """The type of the trained weights; None for that of the layer's dense part."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Slots that are not tensors."""
    frozen: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The types of the roles that are not trained. The optimizer keeps no state of them."""
    groups: Mapping[str, int | None] | None = None
    """The optimizer's group of each role; None for one that it does not train. None where each host
    knows them by itself."""

    def slots_of(self, role: str) -> tuple[Slot, ...]:
        if role in self.frozen:
            return ()
        return tuple(slot for slot in self.slots if slot.roles is None or role in slot.roles)

    def values_of(self, role: str) -> dict[str, Any]:
        return {} if role in self.frozen else dict(self.values)

    def dtype_of(self, role: str, layer: RoutedExperts) -> torch.dtype:
        return self.frozen.get(role) or self.dtype or layer.dense_dtype


_SENT_BYTES = 2**28
"""Bytes that a host sends at a time. An expert that is copied to many hosts would need as many times its own
memory on the host that sends it."""


class Move(NamedTuple):
    """An expert that one host sends to another."""

    sender: int
    receiver: int
    expert_id: int


def needed_moves(
    old: LayerStructure, new: LayerStructure, sources: Mapping[int, tuple[int, ...]]
) -> list[Move]:
    """Return the experts to send, in one order that all hosts compute alike.

    Each host of a new expert needs the old ones that it is made from. The hosts that hold one share the
    sending: their copies are equal to the bit."""
    receivers: dict[int, set[int]] = {}
    for expert in new.experts:
        for source in sources[expert.id]:
            missing = set(expert.hosts) - set(old.expert(source).hosts)
            receivers.setdefault(source, set()).update(missing)
    moves: list[Move] = []
    for source, hosts in receivers.items():
        holders = old.expert(source).hosts
        senders = itertools.cycle(holders)
        moves += [Move(next(senders), host, source) for host in sorted(hosts)]
    return sorted(moves)


def exchange_experts(
    layer: RoutedExperts,
    old: LayerStructure,
    new: LayerStructure,
    sources: Mapping[int, tuple[int, ...]],
    own: Mapping[int, ExpertTensors],
    spec: StateSpec,
) -> dict[int, ExpertTensors]:
    """Send this host's experts to the hosts that need them, and return those that it receives, by id.

    All hosts must call it."""
    exchange = layer.context.exchange
    moves = needed_moves(old, new, sources)
    if not moves:
        return {}
    device = layer.load_E.device
    layouts = {move.expert_id: _layout(layer, old.expert(move.expert_id).size, spec) for move in moves}
    num_bytes = {expert_id: sum(entry.num_bytes for entry in layout) for expert_id, layout in layouts.items()}
    leaving = [move for move in moves if move.sender == exchange.rank]
    arriving = [move for move in moves if move.receiver == exchange.rank]
    packed = {
        move.expert_id: torch.cat(
            [_to_bytes(own[move.expert_id][entry.key]).to(device) for entry in layouts[move.expert_id]]
        )
        for move in leaving
    }
    received = {
        move.expert_id: torch.empty(num_bytes[move.expert_id], dtype=torch.uint8, device=device)
        for move in arriving
    }
    most_sent = max(Counter(move.sender for move in moves).values())
    length = max(1, _SENT_BYTES // most_sent)
    for begin in range(0, max(num_bytes.values()), length):
        to_hosts = [(move.receiver, packed[move.expert_id][begin : begin + length]) for move in leaving]
        from_hosts = [(move.sender, received[move.expert_id][begin : begin + length]) for move in arriving]
        _exchange_pieces(exchange, to_hosts, from_hosts, device)
    result: dict[int, ExpertTensors] = {}
    for move in arriving:
        tensors: ExpertTensors = {}
        position = 0
        for entry in layouts[move.expert_id]:
            piece = received[move.expert_id][position : position + entry.num_bytes]
            tensor = piece.clone().view(entry.dtype).view(entry.shape)
            tensors[entry.key] = tensor.cpu() if entry.on_host else tensor
            position += entry.num_bytes
        result[move.expert_id] = tensors
    return result


def _exchange_pieces(
    exchange: Exchange,
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    device: torch.device,
) -> None:
    """Send bytes to hosts, and fill the tensors for those of hosts. Both are in the order of hosts."""
    counts = [[0] * exchange.size, [0] * exchange.size]
    for own_counts, pieces in zip(counts, (sent, received), strict=True):
        for host, piece in pieces:
            own_counts[host] += len(piece)
    flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(piece for _, piece in sent)])
    parts = exchange.all_to_all_rows(flat, *counts).wait().split([len(piece) for _, piece in received])
    for (_, piece), part in zip(received, parts, strict=True):
        piece.copy_(part)


class _Entry(NamedTuple):
    key: tuple[str, str]
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _layout(layer: RoutedExperts, size: int, spec: StateSpec) -> list[_Entry]:
    """Return the tensors of an expert of a size, in the order in which they are sent."""
    form = layer.bank.form
    entries: list[_Entry] = []
    for role in form.roles:
        shape = form.shape(role, layer.bank.width, size)
        entries.append(_Entry(("", role), spec.dtype_of(role, layer), shape))
        entries += [
            _Entry((slot.name, role), slot.dtype, slot.shape(shape), slot.on_host)
            for slot in spec.slots_of(role)
        ]
    return entries


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
