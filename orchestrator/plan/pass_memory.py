"""The memory of forward and backward passes as lines in the number of samples. Pure.

A moment is the time after an allocation of a traced pass. What is alive then grows evenly with the samples,
but for the logits of a loss in chunks, which stop growing where a chunk is full. The peak of a pass is the
highest line at its number of samples: a small batch has it at the end of the backward pass, where all
gradients are alive, a large one at its beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np


class Moment(NamedTuple):
    """Bytes that are alive at one moment of a pass, apart from parameters."""

    base: float = 0.0
    """Whatever the number of samples, such as copies of weights in another precision."""
    per_sample: float = 0.0
    expert_base: float = 0.0
    """As ``base``, inside experts: a host has them of its own experts alone."""
    gradients: float = 0.0
    """Gradients of the dense part that are complete."""
    expert_gradients: float = 0.0
    logits: float = 0.0
    """Bytes per sample of the logits of a loss in chunks."""
    exchanged: float = 0.0
    """Bytes per sample of the rows that experts compute at this moment: hosts exchange them."""


_NOTHING = Moment()


@dataclass(frozen=True)
class PassMemory:
    """The moments of a pass in its three forms, without those that are below another one in every part."""

    saved: tuple[Moment, ...] = (_NOTHING,)
    """Activations are saved."""
    blocks_recomputed: tuple[Moment, ...] = (_NOTHING,)
    experts_recomputed: tuple[Moment, ...] = (_NOTHING,)
    end: Moment = _NOTHING
    """After the backward pass."""
    full_chunk: float = 0.0
    """Most bytes that a loss in chunks holds for logits."""

    def form(self, blocks: bool, experts: bool) -> tuple[Moment, ...]:
        """Return the moments of passes that recompute blocks, or experts alone, or neither."""
        if blocks:
            return self.blocks_recomputed
        return self.experts_recomputed if experts else self.saved

    def alive(self, moment: Moment, samples: int, expert_share: float = 1.0) -> float:
        """Return the bytes at a moment, without gradients."""
        logits = min(moment.logits * samples, self.full_chunk)
        return moment.base + expert_share * moment.expert_base + moment.per_sample * samples + logits

    def changed(self, change: Callable[[Moment], Moment]) -> PassMemory:
        """Return passes whose moments are changed."""
        names = ("saved", "blocks_recomputed", "experts_recomputed")
        forms = {name: tuple(change(moment) for moment in getattr(self, name)) for name in names}
        return replace(self, **forms, end=change(self.end))


def between(short: PassMemory, long: PassMemory, share: float) -> PassMemory:
    """Return passes whose peaks lie between those of two others, at a share of the way."""

    def blend(less: Moment, more: Moment) -> Moment:
        pairs = zip(less, more, strict=True)
        return Moment(*(begin + share * (end - begin) for begin, end in pairs))

    def blends(less: tuple[Moment, ...], more: tuple[Moment, ...]) -> tuple[Moment, ...]:
        return highest(blend(*pair) for pair in product(less, more))

    return PassMemory(
        blends(short.saved, long.saved),
        blends(short.blocks_recomputed, long.blocks_recomputed),
        blends(short.experts_recomputed, long.experts_recomputed),
        blend(short.end, long.end),
        max(short.full_chunk, long.full_chunk),
    )


def highest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the moments that can be the peak of some number of samples."""
    # No moment covers one that comes before it. In arrays: blends of two passes have thousands of moments.
    ordered = sorted(set(moments), key=lambda each: -sum(each))
    parts = np.array(ordered)
    found = np.empty_like(parts)
    kept: list[int] = []
    for number, moment in enumerate(parts):
        if not (found[: len(kept)] >= moment).all(axis=1).any():
            found[len(kept)] = moment
            kept.append(number)
    return tuple(ordered[number] for number in kept)
