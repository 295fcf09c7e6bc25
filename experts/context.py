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


@dataclass
class MoEContext:
    """The hosts, as one of them sees them. ``silent`` says that the tokens at hand stand in for none: they go nowhere and
    are counted nowhere. ``first`` is the place of the first of the ``samples`` at hand in the global batch (0 samples: as many
    as the first dimension says), ``seed`` that of the step: noise is drawn by them."""

    exchange: Exchange = field(default_factory=LocalExchange)
    chunks: int = 1
    silent: bool = False
    first: int = 0
    samples: int = 0
    seed: int = 0
    cache: RecomputeCache | None = None

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
