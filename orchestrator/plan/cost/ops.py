"""What one device does in a micro-batch, as plain values: the cost model's input. Pure.

Products are given by their sizes, because what they cost depends on them; all other operations by
the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProductLayout = Literal["nn", "nt", "tn"]
"""Which of a product's two factors is read transposed."""
MoveKind = Literal["plain", "heavy", "gelu_backward", "norm", "norm_backward", "rows", "sort", "reduce"]
"""Reading and writing alone; with a transcendental function each; the derivative of one, which
CPUs are slow at; row-wise norms and softmaxes; the derivative of a norm, with the sums over all
rows for its weights; rows by their index; sorting; sums over rows."""
MOVES: tuple[MoveKind, ...] = (
    "plain",
    "heavy",
    "gelu_backward",
    "norm",
    "norm_backward",
    "rows",
    "sort",
    "reduce",
)
MessageKind = Literal["counts", "rows"]


@dataclass(frozen=True)
class ProductOp:
    """``batch`` products of (m × k) by (k × n) in one operation, done ``times`` times in a
    micro-batch."""

    m: int
    k: int
    n: int
    layout: ProductLayout = "nn"
    batch: int = 1
    precision: str = "fp32"
    of_experts: bool = False
    times: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.batch * self.times


@dataclass(frozen=True)
class AttentionOp:
    """Fused attention over ``heads`` heads (those of all samples) of ``length`` tokens and
    ``width`` features each."""

    heads: int
    length: int
    width: int
    backward: bool = False
    precision: str = "fp32"
    times: int = 1

    @property
    def flops(self) -> float:
        """Two products of length × width × length, five in the backward pass; half of it above the
        diagonal, left out."""
        return (5 if self.backward else 2) * self.heads * float(self.length) ** 2 * self.width * self.times


@dataclass(frozen=True)
class MoveOp:
    """An operation that reads and writes so many bytes together."""

    kind: MoveKind
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class MessageOp:
    """An exchange among hosts: the bytes that leave this one for all others together."""

    kind: MessageKind
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class MicroBatchOps:
    """One micro-batch on one device, forward and backward, and the state it is done with."""

    samples: int
    products: tuple[ProductOp, ...] = ()
    attentions: tuple[AttentionOp, ...] = ()
    moves: tuple[MoveOp, ...] = ()
    messages: tuple[MessageOp, ...] = ()
    operations: int = 0
    """All that compute or move something and are torch's own; each costs the host its overhead."""
    launches: int = 0
    """Those that go through Python of ours on their way: fused kernels, and products of several
    experts at once."""
    sorts: int = 0
    """Of the operations, those that a GPU sorts for, with a dozen kernels each; on CPUs none are
    told apart."""
    views: int = 0
    """Operations that only look at memory another way."""
    parameters: int = 0
    """Held by this device."""
    expert_parameters: int = 0
    """Of these, those in experts that live here alone."""
    tensors: int = 0
    """Parameters as the optimizer counts them."""
    peak_bytes: float = 0.0
    """The most that is alive at once beside parameters and optimizer state: batch, activations and
    gradients."""
    before_wait: MicroBatchOps | None = None
    """The part of it that is done when the host has waited for the last time for a figure of the
    device: how many rows each expert or each host gets. None where it never does."""
    state_bytes_per_parameter: int = 12
    """fp32 weights and two moments of AdamW."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + sum(
            attention.flops for attention in self.attentions
        )

    @property
    def gradient_bytes(self) -> float:
        """Of what every device has and all must sum."""
        return 4.0 * (self.parameters - self.expert_parameters)
