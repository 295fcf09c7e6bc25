"""What the MoE layers of a model share on one host: the way to the other hosts, and what whoever runs the steps tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor

from experts.exchange import Exchange, LocalExchange

T = TypeVar("T")


@dataclass
class RecomputeCache:
    """What happened between hosts in a pass that will be repeated: a repeated pass takes it from here, so that nothing
    travels, and nobody is routed, twice."""

    kept: list[Any] = field(default_factory=list)
    mode: Literal["write", "read"] = "write"
    place: int = 0

    @contextmanager
    def writing(self, hosts: MoEContext) -> Iterator[None]:
        self.kept, self.mode = [], "write"
        with _set(hosts, self):
            yield

    @contextmanager
    def reading(self, hosts: MoEContext) -> Iterator[None]:
        self.mode, self.place = "read", 0
        with _set(hosts, self):
            yield


@dataclass(frozen=True)
class StepContext:
    """The part of a step's global batch that one forward and backward pass computes."""

    seed: int = 0
    """Seed of the optimizer step, the same on all hosts. The gate's noise is a function of it and of a token's
    position in the global batch."""
    first_sample: int = 0
    """Index of the pass's first sample in the global batch."""
    num_samples: int | None = None
    """Samples of the pass, from which the tokens per sample follow. None: the first dimension of a layer's input
    counts them."""
    dummy: bool = False
    """The pass only keeps this host in step with the others. Its tokens are sent to no host and count nowhere."""


@dataclass
class MoEContext:
    """Context shared by the MoE layers of a model on one host.

    User models call ``layer(x)``, so that values of the current pass cannot be arguments of ``forward``. The layers
    read them from ``step``, which ``use_step`` replaces as a whole."""

    exchange: Exchange = field(default_factory=LocalExchange)
    chunks: int = 1
    step: StepContext = field(default_factory=StepContext)
    cache: RecomputeCache | None = None

    @contextmanager
    def use_step(self, step: StepContext) -> Iterator[None]:
        """Make ``step`` the current one. The backward pass belongs inside: recomputation reads it again."""
        before = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = before

    def replayed(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, or what it returned when the pass at hand was made the first time."""
        tape = self.cache
        if tape is None:
            return make()
        if tape.mode == "write":
            made = make()
            tape.kept.append(_apart(made))
            return made
        tape.place += 1
        return tape.kept[tape.place - 1]

    @property
    def repeating(self) -> bool:
        return self.cache is not None and self.cache.mode == "read"


def _apart(value: Any) -> Any:
    """The same without its history, which a repeated pass makes anew."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tuple(map(_apart, value)) if isinstance(value, tuple) else value


@contextmanager
def _set(hosts: MoEContext, tape: RecomputeCache) -> Iterator[None]:
    before, hosts.cache = hosts.cache, tape
    try:
        yield
    finally:
        hosts.cache = before
