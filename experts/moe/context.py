"""Context that the MoE layers of a model share on one host.

It holds the exchange with other hosts, the current step, and the results that a recomputed forward
pass replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from experts.tokens.bounds import ExchangeBounds
from experts.tokens.exchange import Exchange, LocalExchange
from experts.tokens.received_rows import RowCheck

T = TypeVar("T")


@dataclass(frozen=True)
class StepContext:
    """The part of a step's global batch that one forward and backward pass computes."""

    seed: int = 0
    """Seed of the optimizer step, the same on all hosts. The gate's noise is a function of it and
    of a token's position in the global batch."""
    first_sample: int = 0
    """Index of the pass's first sample in the global batch."""
    num_samples: int | None = None
    """Samples of the pass, from which the tokens per sample follow. None: the first dimension of a
    layer's input counts them."""
    dummy: bool = False
    """The pass only keeps this host in step with the others. Its tokens are sent to no host and
    count nowhere."""
    counted_T: Tensor | None = None
    """For each token of the pass 1, or 0 for padding, which the counts of experts leave out. None: all
    tokens count."""

    def positions(self, tokens: int, first_dimension: int, device: torch.device) -> Tensor:
        """Return the positions in the global batch of the tokens of a pass.

        Inputs may be flattened to (samples * tokens, width), so ``first_dimension`` counts samples only by
        default."""
        num_samples = self.num_samples or first_dimension
        tokens_per_sample = tokens // max(1, num_samples)
        return self.first_sample * tokens_per_sample + torch.arange(tokens, device=device)


@dataclass
class RecomputeCache:
    """Results of a forward pass that activation checkpointing will run again.

    The second pass takes routing decisions and received rows from here, so that nothing is routed
    or sent twice."""

    values: list[Any] = field(default_factory=list)
    mode: Literal["record", "replay"] = "record"
    position: int = 0

    @contextmanager
    def recording(self, context: MoEContext) -> Iterator[None]:
        self.values = []
        self.mode = "record"
        with context.use_cache(self):
            yield

    @contextmanager
    def replaying(self, context: MoEContext) -> Iterator[None]:
        self.mode = "replay"
        self.position = 0
        with context.use_cache(self):
            yield

    def next_value(self) -> Any:
        self.position += 1
        return self.values[self.position - 1]


@dataclass
class MoEContext:
    """Context shared by the MoE layers of a model on one host.

    User models call ``layer(x)``, so that values of the current pass cannot be arguments of
    ``forward``. The layers read them from ``step``, which ``use_step`` replaces as a whole."""

    exchange: Exchange = field(default_factory=LocalExchange)
    num_chunks: int = 1
    """Chunks that a layer's tokens are sent in. The experts compute on one while the next is on its
    way."""
    step: StepContext = field(default_factory=StepContext)
    cache: RecomputeCache | None = None
    observing: bool = False
    """Whether the layers collect statistics in this step."""
    bounds: ExchangeBounds | None = None
    """Bounds of the rows between hosts; None if counts are exchanged in every layer."""
    by_choice: bool = False
    """Whether each choice of a token is a row of its own, in both directions, and experts compute the rows of
    each host apart. Then no sum, and no product, depends on the hosts of the experts."""
    row_checks: list[RowCheck] = field(default_factory=list)
    """Checks of received rows whose figures the host has not read yet."""

    def finish_row_checks(self) -> None:
        """Raise ``InvalidRows`` if rows received since the last call were wrong.

        Call it where the host has waited for the device and knows that the group was not left: rows
        of an aborted exchange are expected to be wrong."""
        checks = self.row_checks
        self.row_checks = []
        for check in checks:
            check.finish()

    @contextmanager
    def use_step(self, step: StepContext) -> Iterator[None]:
        """Make ``step`` the current one.

        The backward pass belongs inside: recomputation reads it again."""
        before = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = before

    @contextmanager
    def use_cache(self, cache: RecomputeCache) -> Iterator[None]:
        before = self.cache
        self.cache = cache
        try:
            yield
        finally:
            self.cache = before

    def replayed(self, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``; in a recomputed pass, the result of the first pass."""
        if self.cache is None:
            return compute()
        if self.replaying:
            return self.cache.next_value()
        # In the order of the calls: the recomputed pass makes the same calls in the same order.
        result = compute()
        self.cache.values.append(_detached(result))
        return result

    @property
    def observes(self) -> bool:
        """Whether this pass counts in the statistics: not a recomputed or a dummy one."""
        return self.observing and not self.replaying and not self.step.dummy

    @property
    def replaying(self) -> bool:
        """Whether this is a recomputed pass."""
        return self.cache is not None and self.cache.mode == "replay"


def _detached(value: Any) -> Any:
    """Return the value without its autograd history, which the recomputed pass builds again."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value
