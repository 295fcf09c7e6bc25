"""Values of the MoE layer. Letters of shapes: T tokens, D width, H hidden size, E experts, K experts per token, R rows (a row
is one token on its way to one expert), S rows that leave for other hosts, G rows that came from them, N hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["swiglu", "ffn"]
Scores = Literal["softmax", "sigmoid"]
Kernel = Literal["auto", "loop", "grouped"]


@dataclass(frozen=True)
class Routing:
    """What a gate decided for a batch of tokens, and what that costs. Losses are sums over the tokens, so that they add
    up over micro-batches and hosts."""

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    balance: Tensor
    z: Tensor


@dataclass(frozen=True)
class RowMap:
    """Rows that are copies of others: row r copies row ``source_R[r]``, and ``back_TK`` names the copies of each row, -1
    for none. What is spread out by it is summed up by it again, in the order of K."""

    source_R: Tensor
    back_TK: Tensor
    full: bool
    """Whether there is no -1."""


@dataclass(frozen=True)
class Trip:
    """The record ``dispatch`` leaves for ``combine``: which rows the experts got, sorted by slot, the order in which a bank
    keeps its experts, and the weight of each."""

    fan: RowMap
    weights_R: Tensor
    counts_S: Tensor
