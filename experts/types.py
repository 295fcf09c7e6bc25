"""Value types of the MoE layer.

Letters of tensor shapes, in all of ``experts``:

- T tokens, D width of a token, H hidden size of an expert
- E experts of a layer, K experts per token, N hosts
- L local slots: the places of a host's experts in its bank
- R rows: a row is one token on its way to one expert
- S rows sent to hosts, G rows received from them: one token on its way to one host
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["swiglu", "ffn"]
Scores = Literal["softmax", "sigmoid"]
Kernel = Literal["auto", "loop", "grouped"]
Packing = Literal["nf4", "int8"]
"""Forms of frozen weights in 4 or 8 bits."""


@dataclass(frozen=True)
class Choices:
    """The decision of a router for a batch of tokens."""

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    """Tokens per expert."""


@dataclass(frozen=True)
class Routing(Choices):
    """The decision of a gate for a batch of tokens, and its losses.

    Losses are sums over the tokens, so that they add up over micro-batches and hosts."""

    balance: Tensor
    z: Tensor


@dataclass(frozen=True)
class RowMap:
    """Rows that are copies of tokens: the index to copy by, and its inverse to sum by."""

    token_R: Tensor
    """The token that each row copies."""
    row_TK: Tensor
    """The rows that copy each token, in the order in which they are summed; -1 for none."""
    complete: bool
    """Whether ``row_TK`` has no -1."""


@dataclass(frozen=True)
class Trip:
    """The record of a ``dispatch``."""

    row_map: RowMap
    """Rows of this host's experts, sorted by local slot."""
    weights_R: Tensor
    counts_L: Tensor
    """Rows per local slot."""
