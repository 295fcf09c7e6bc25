"""The parts of a layer's tokens that are sent in one chunk each. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass
class TokenPart:
    """The tokens of a chunk, and the choices of their experts and hosts."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    host_TK: Tensor
    is_empty: bool = False

    def in_order(self, num_chunks: int) -> list[TokenPart]:
        """Return a part of the tokens for each chunk."""
        if num_chunks == 1:
            # Slicing a single chunk would add nodes to the autograd graph.
            return [self]
        return [
            TokenPart(self.x_TD[part], self.weights_TK[part], self.experts_TK[part], self.host_TK[part])
            for part in chunk_slices(len(self.x_TD), num_chunks)
        ]

    def by_chunk(self, chunk_T: Tensor, num_chunks: int) -> list[TokenPart]:
        """Return a part for each chunk, with all tokens: those of other chunks go to no host in it."""
        if num_chunks == 1:
            return [self]
        x_TDs = _SplitGradients.apply(self.x_TD, chunk_T, num_chunks)
        weights_TKs = _SplitGradients.apply(self.weights_TK, chunk_T, num_chunks)
        no_host = torch.full_like(self.host_TK, -1)
        hosts = [
            torch.where(chunk_T.unsqueeze(1) == chunk, self.host_TK, no_host) for chunk in range(num_chunks)
        ]
        return [
            TokenPart(x_TD, weights_TK, self.experts_TK, host_TK)
            for x_TD, weights_TK, host_TK in zip(x_TDs, weights_TKs, hosts, strict=True)
        ]

    def padded(self) -> TokenPart:
        """Return the part with a token, if it has none.

        Padding copies a token: one that is sent to no host stands for those that are missing."""
        if len(self.host_TK):
            return self
        size = self.experts_TK.shape[1]
        no_host = self.host_TK.new_full((1, size), -1)
        weights = self.weights_TK.new_zeros(1, size)
        x_TD = self.x_TD.new_zeros(1, self.x_TD.shape[1])
        return TokenPart(x_TD, weights, torch.zeros_like(no_host), no_host, is_empty=True)


def chunk_slices(tokens: int, num_chunks: int) -> list[slice]:
    """Cut tokens into chunks, as many on every host.

    Each chunk is a collective, also where a host has no tokens for it."""
    bounds = [tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def chunk_of_host(host_T: Tensor, rank: int, num_hosts: int, num_chunks: int) -> Tensor:
    """Return the chunk of each token where a chunk has the rows to some of the hosts, and none for no host.

    All rows of a micro-batch for a host stay together, so that its experts compute them at once. Hosts at
    one distance are in one chunk: this host's own rows come first, and a chunk has as many hosts on each."""
    distance_T = (host_T - rank) % num_hosts
    return torch.where(host_T < 0, -1, distance_T * num_chunks // num_hosts)


def selected(values: Sequence[Tensor], chunk_T: Tensor) -> Tensor:
    """Return the row of each token from the values of its chunk: sums with zeros would lose signs."""
    result = values[0]
    for chunk, value in enumerate(values[1:], 1):
        result = torch.where(chunk_T.unsqueeze(1) == chunk, value, result)
    return result


class _SplitGradients(torch.autograd.Function):
    """Copies of a tensor for each chunk; the gradient of a row is that of its chunk alone."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, chunk_T: Tensor, num_chunks: int) -> tuple[Tensor, ...]:
        ctx.chunk_T = chunk_T
        return tuple(rows_TD.view_as(rows_TD) for _ in range(num_chunks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return selected(grads, ctx.chunk_T), None, None
