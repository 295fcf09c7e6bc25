"""Gradients of experts that have copies on several hosts.

Each copy computes some of the expert's tokens. The sum of their gradients is the gradient of the expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experts.routed import RoutedExperts
from experts.tokens.exchange import Exchange


class _Copy(NamedTuple):
    """One matrix of a copied expert on this host: its stack, its place there, and all its hosts."""

    stack: nn.Parameter
    place: int
    hosts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.stack[0].numel() * self.stack.itemsize

    @property
    def gradient(self) -> Tensor:
        gradient = self.stack.grad
        assert gradient is not None, "an expert without tokens has a gradient of zero"
        return gradient[self.place]


class CopiedGradients:
    """Adds up the gradients of copies, in the order of hosts: all copies get the same sum to the bit."""

    def __init__(self, layers: Sequence[RoutedExperts], exchange: Exchange) -> None:
        self._exchange = exchange
        self._device = layers[0].load_E.device if layers else torch.device("cpu")
        banks = {layer.bank: layer for layer in layers}
        self._copies = [copy for layer in banks.values() for copy in _copies(layer, exchange.rank)]
        experts = [expert for layer in layers for expert in layer.structure.experts]
        self._any_copied = any(len(expert.hosts) > 1 for expert in experts)
        # Each pair of hosts exchanges the experts that both have, in one order.
        self._messages = [
            [n for n, copy in enumerate(self._copies) if host in copy.hosts and host != exchange.rank]
            for host in range(exchange.size)
        ]

    def add_up(self) -> None:
        """Sum the gradients of each copied expert over its hosts. All hosts must call it."""
        if not self._any_copied:
            return
        gradients = self._exchanged()
        for number, copy in enumerate(self._copies):
            total = torch.zeros_like(copy.gradient)
            for host in copy.hosts:
                total += copy.gradient if host == self._exchange.rank else gradients[number, host]
            copy.gradient.copy_(total)

    def _exchanged(self) -> dict[tuple[int, int], Tensor]:
        """Send this host's gradients to the other copies; return theirs by copy and host."""
        counts = [sum(self._copies[number].num_bytes for number in message) for message in self._messages]
        order = [number for message in self._messages for number in message]
        sent = [self._copies[number].gradient.reshape(-1).view(torch.uint8) for number in order]
        flat = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=self._device)
        received = self._exchange.all_to_all_rows(flat, counts, counts).wait()
        gradients: dict[tuple[int, int], Tensor] = {}
        begin = 0
        for host, message in enumerate(self._messages):
            for number in message:
                copy = self._copies[number]
                end = begin + copy.num_bytes
                # Cloned: the bytes of a message need not be aligned to the type.
                piece = received[begin:end].clone().view(copy.stack.dtype)
                gradients[number, host] = piece.view(copy.stack.shape[1:])
                begin = end
        return gradients


def _copies(layer: RoutedExperts, rank: int) -> list[_Copy]:
    """Return the matrices of this host's copied experts, in an order that all hosts share."""
    copies: list[tuple[int, str, _Copy]] = []
    for group, role, stack in layer.bank.stacks():
        for place, row in enumerate(group.rows):
            hosts = layer.structure.experts[row].hosts
            if len(hosts) > 1 and rank in hosts and stack.requires_grad:
                copies.append((row, role, _Copy(stack, place, hosts)))
    return [copy for _, _, copy in sorted(copies, key=lambda entry: entry[:2])]
