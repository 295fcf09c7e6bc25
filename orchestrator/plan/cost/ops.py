"""The operations of one device in a micro-batch, as plain values: the input of the cost model.
Pure.

A matrix product is described by its sizes, because its rate depends on them; every other operation
by the bytes that it reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ProductLayout = Literal["nn", "nt", "tn", "conv"]
"""Which of the two factors of a product is read transposed: neither, the second, or the first. ``conv`` is a
convolution: its kernel gathers the rows of the first factor itself, and their alignment does not matter."""
MoveKind = Literal["plain", "heavy", "gelu_backward", "norm", "norm_backward", "rows", "sort", "reduce"]
"""How an operation uses its bytes.

``plain``: reads and writes alone. ``heavy``: a transcendental function of each element.
``gelu_backward``: the derivative of one, which is slow on CPUs. ``norm``: row-wise norms and
softmaxes. ``norm_backward``: the derivative of a norm, with sums over all rows for its weights.
``rows``: rows by index. ``sort``: sorting. ``reduce``: sums over rows.
"""
MOVES: tuple[MoveKind, ...] = get_args(MoveKind)
MessageKind = Literal["counts", "rows"]


@dataclass(frozen=True)
class ProductOp:
    """``batch`` products of (m × k) by (k × n) in one operation, run ``times`` times in a
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
    """Fused attention over the ``heads`` of all samples, each of ``width`` features.

    ``pairs`` of a query and a key count for each head: of causal attention those below the diagonal."""

    heads: int
    pairs: float
    width: int
    backward: bool = False
    precision: str = "fp32"
    times: int = 1
    value_width: int | None = None
    """Features of a value, where they are not as many as those of a query and a key."""

    @property
    def flops(self) -> float:
        """FLOP of two products over all pairs, or five in the backward pass."""
        of_keys, of_values = (3, 2) if self.backward else (1, 1)
        value_width = self.width if self.value_width is None else self.value_width
        features = of_keys * self.width + of_values * value_width
        return 2 * self.heads * self.pairs * features * self.times


@dataclass(frozen=True)
class MoveOp:
    """An operation that is bound by memory: ``bytes`` are those it reads and writes together."""

    kind: MoveKind
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class MessageOp:
    """A message of the token exchange: ``bytes`` are those that leave this host for all others
    together."""

    kind: MessageKind
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class MicroBatchOps:
    """The operations of one micro-batch on one device, forward and backward, and the size of its
    state."""

    samples: int
    products: tuple[ProductOp, ...] = ()
    attentions: tuple[AttentionOp, ...] = ()
    moves: tuple[MoveOp, ...] = ()
    messages: tuple[MessageOp, ...] = ()
    operations: int = 0
    """Number of torch's own operations that compute or move something; each has an overhead on the
    host."""
    launches: int = 0
    """Number of kernels launched from this project's Python: fused kernels, and grouped
    products."""
    sorts: int = 0
    """Number of operations that sort on a GPU, with a dozen kernels each; 0 on CPUs, where they
    cost the same."""
    views: int = 0
    """Number of operations that return a view of memory."""
    parameters: int = 0
    """Parameters on this device."""
    expert_parameters: int = 0
    """The part of ``parameters`` in experts that only this device has."""
    frozen: int = 0
    """The part of ``parameters`` that is not trained."""
    frozen_experts: int = 0
    """The part of ``expert_parameters`` that is not trained."""
    frozen_bytes: int = 0
    """Bytes of the ``frozen`` parameters: they may be stored in two bytes each, trained ones in four."""
    frozen_expert_bytes: int = 0
    """Bytes of the ``frozen_experts``."""
    tensors: int = 0
    """Parameter tensors of the optimizer."""
    before_wait: MicroBatchOps | None = None
    """The operations up to the last time that the host waits for a value of the device; None if it
    never waits.

    The value is the number of rows of each expert or each host."""

    @property
    def flops(self) -> float:
        product_flops = sum(product.flops for product in self.products)
        return product_flops + sum(attention.flops for attention in self.attentions)

    @property
    def trained(self) -> int:
        """Trained parameters on this device."""
        return self.parameters - self.frozen

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of replicated parameters, which all devices reduce."""
        return 4.0 * (self.trained - self._trained_experts)

    @property
    def expert_gradient_bytes(self) -> float:
        """Bytes of the gradients of this device's experts, which their copies sum."""
        return 4.0 * self._trained_experts

    @property
    def replicated_bytes(self) -> float:
        """Bytes of the parameters that all devices have, or gather shards of: trained ones in fp32."""
        trained = self.trained - self._trained_experts
        return 4.0 * trained + self.frozen_bytes - self.frozen_expert_bytes

    @property
    def _trained_experts(self) -> int:
        return self.expert_parameters - self.frozen_experts
