"""Values of the MoE layer. Letters of shapes: T tokens, D width, H hidden size, E experts, K experts per token, R rows
(a row is one token on its way to one expert, R = T × K)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
class Trip:
    """The record ``dispatch`` leaves for ``combine``: where each row came from. Rows are sorted by slot, the order in
    which a bank keeps its experts."""

    order_R: Tensor
    back_R: Tensor
    weights_TK: Tensor
    counts_S: Tensor
